"""What grading costs: samples a second, and what hanging ones, isolation and a judge add.

`python tests/benchmarks/rewards.py [--part math|bombs|memory|code|judge] [--samples N]`. Every
ratio compares medians of runs that took turns, so that other work on the machine hits both alike.
`judge` needs `--judge-url`, or `--judge-model DIR` and `--python` of the engines' environment. The
last line is JSON.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# This file is called like the folder that it measures.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from math_verify import parse, verify

from rewards import judge
from rewards.contract import Program, RewardInput, SandboxLimits
from tasks.reward.contract import RewardConfig, RewardPart, SandboxConfig
from tasks.reward.endpoint import open_endpoint
from tasks.reward.pool import RewardPool
from tasks.reward.sandbox import open_sandbox
from tasks.workspace import Workspace

PROSE = "Adding both sides we get a longer line of reasoning that nobody reads. " * 8
BOMBS = [
    r"9^{9^{9^{9}}}",
    r"(10^9)!",
    r"2\cdot 9^{9^{9^9}}",
    r"\sum_{k=1}^{10^{12}} \frac{1}{k^2}",
    r"\prod_{k=1}^{10^{12}} k",
    r"(x+y+z)^{200}",
    r"\sqrt{9^{9^{9}}}",
    r"\ln((10^9)!)",
    r"\{@User 1276915 4951077 ник 1,1-3-10 鼓励);5个_GENERAL2 _HEADERS1 Orchestra\}",
    r"|x||x||x||x||x||x||x||x||x||x||x||x||x||x||x||x||x||x||x||x||x||x|",
]
HANGING = "tests.unit.reward.grader_fixtures.misbehaving"
PRINT = "print(1)"
HANG = "while True:\n    pass"
LOGS = tempfile.TemporaryDirectory()
Figures = dict[str, float]


def main() -> None:
    parts: dict[str, Callable[[argparse.Namespace], Figures]] = {
        "math": measure_math,
        "bombs": measure_bombs,
        "memory": measure_memory,
        "code": measure_code,
        "judge": measure_judge,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="append", choices=parts, help="default: all but judge")
    parser.add_argument("--samples", type=int, help="samples of a run; each part has its default")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind; medians count")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--judge-url", help="of an OpenAI-compatible service")
    parser.add_argument("--judge-model", help="or a model directory, served here by vLLM")
    parser.add_argument("--python", help="interpreter of the engines' environment")
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
    figures: dict[str, Figures] = {}
    for part in asked.part or [name for name in parts if name != "judge"]:
        figures[part] = parts[part](asked)
        for name, value in figures[part].items():
            print(f"{part:<8}{name:<44}{value:>12,.3f}", flush=True)
    print(json.dumps({"benchmark": "rewards", "workers": asked.workers, "figures": figures}))


def measure_math(asked: argparse.Namespace) -> Figures:
    """Easy answers: through the pool, and through plain math-verify in as many processes."""
    items = easy_items(asked.samples or 1000)
    with pool(["math"], asked.workers) as graders, plain_processes(asked.workers) as plain:
        ours, theirs = in_turns(
            asked.repeats,
            lambda: graders.grade(items, config=math_config()),
            lambda: list(plain.map(verify_plainly, items, chunksize=32)),
        )
    return {
        "samples_per_s": len(items) / ours,
        "plain_math_verify_samples_per_s": len(items) / theirs,
        "time_against_plain": ours / theirs,
    }


def measure_bombs(asked: argparse.Namespace) -> Figures:
    """One in a hundred is a bomb, or hangs for certain; against none."""
    num = asked.samples or 2000
    config = math_config()
    bombs = [f"{PROSE}\\boxed{{{bomb}}}" for bomb in BOMBS]
    hanging = RewardConfig(parts=[RewardPart(kind="math"), RewardPart(kind=HANGING)])
    with pool(["math", HANGING], asked.workers) as graders:
        easy, bombed = in_turns(
            asked.repeats,
            lambda: graders.grade(easy_items(num), config=config),
            lambda: graders.grade(mixed_items(num, bombs), config=config),
        )
        base, hangs = in_turns(
            1,
            lambda: graders.grade(easy_items(num), config=hanging),
            lambda: graders.grade(mixed_items(num, ["spin"]), config=hanging),
        )
    num_hanging = -(-num // 100)
    return {
        "easy_s": easy,
        "with_1_percent_bombs_s": bombed,
        "bombs_against_easy": bombed / easy,
        "with_1_percent_hanging_s": hangs,
        "hanging_against_easy": hangs / base,
        "least_possible_s": num_hanging * hanging.cpu_limit_s / asked.workers + base,
    }


def measure_memory(asked: argparse.Namespace) -> Figures:
    """Resident memory of workers and of this process, along many samples."""
    num = asked.samples or 20_000
    seen: list[tuple[float, float]] = []
    with pool(["math"], asked.workers) as graders:
        for start in range(0, num, 1000):
            graders.grade(easy_items(1000, first=start), config=math_config())
            workers = [psutil.Process(pid).memory_info().rss for pid in graders.pids()]
            seen.append((max(workers) / 2**20, psutil.Process().memory_info().rss / 2**20))
    tenth = max(1, len(seen) // 10)
    return {
        "worker_mib_first": statistics.median(mib for mib, _ in seen[:tenth]),
        "worker_mib_most": max(mib for mib, _ in seen),
        "worker_mib_last": statistics.median(mib for mib, _ in seen[-tenth:]),
        "parent_mib_first": statistics.median(mib for _, mib in seen[:tenth]),
        "parent_mib_last": statistics.median(mib for _, mib in seen[-tenth:]),
    }


def measure_code(asked: argparse.Namespace) -> Figures:
    """A trivial program in the sandbox, and as a plain process of the same interpreter."""
    num = asked.samples or 200
    with (
        tempfile.TemporaryDirectory() as scratch,
        closing(open_sandbox(SandboxConfig(), scratch=Path(scratch))) as sandbox,
    ):
        limits = SandboxLimits(cpu_s=1.0)

        def isolated(code: str = PRINT) -> float:
            program = Program(files={"main.py": code}, command=["python", "main.py"])
            return seconds(lambda: sandbox.run(program, limits=limits))

        pairs = [(isolated(), seconds(run_plainly)) for _ in range(num)]
        with ThreadPoolExecutor(asked.workers) as threads:
            codes = [PRINT] * num
            all_easy = seconds(lambda: list(threads.map(isolated, codes)))
            codes[::100] = [HANG] * len(codes[::100])
            with_hangs = seconds(lambda: list(threads.map(isolated, codes)))
    walls = sorted(wall for wall, _ in pairs)
    return {
        "sandboxes_per_s": num / all_easy,
        "p50_ms": 1000 * statistics.median(walls),
        "p99_ms": 1000 * walls[min(len(walls) - 1, int(0.99 * len(walls)))],
        "plain_p50_ms": 1000 * statistics.median(plain for _, plain in pairs),
        "isolation_median_ms": 1000 * statistics.median(wall - plain for wall, plain in pairs),
        "with_1_percent_hanging_against_easy": with_hangs / all_easy,
    }


def measure_judge(asked: argparse.Namespace) -> Figures:
    """Samples a second through a judge that answers for real."""
    config = judge.Config(
        rubric="Is the final number right?", url=asked.judge_url, path=asked.judge_model
    )
    items = easy_items(asked.samples or 64)
    with tempfile.TemporaryDirectory() as scratch:
        workspace = Workspace(scratch=Path(scratch), cache=Path(scratch))
        opened = open_endpoint(
            config, serves=judge.SERVES, python=asked.python, workspace=workspace
        )
        with closing(opened) as endpoint, ThreadPoolExecutor(config.concurrency) as threads:

            def score_all() -> list[Any]:
                ask = judge.score_batch
                return list(threads.map(lambda item: ask([item], config, endpoint), items))

            first, again = seconds(score_all), seconds(score_all)
    return {"samples_per_s": len(items) / first, "again_from_cache_per_s": len(items) / again}


def easy_items(num: int, *, first: int = 0) -> list[RewardInput]:
    """Returns numbers, fractions, tuples, sets, roots and polynomials; half of them right."""
    return [_easy_item(index) for index in range(first, first + num)]


def _easy_item(index: int) -> RewardInput:
    n, off = index // 6, index % 2
    gold, answer = [
        (f"{n}", f"{n + off}"),
        (rf"\\frac{{{n}}}{{7}}", rf"\\dfrac{{{2 * n}}}{{{14 + off}}}"),
        (f"({n}, {n + 1})", f"({n},{n + 1 + off})"),
        (rf"\\{{{n},{n + 1}\\}}", rf"\\{{{n + 1},{n + off}\\}}"),
        (rf"\\sqrt{{{n}}}", rf"\\sqrt{{{n + off}}}"),
        (f"x^2+{n}x", f"x(x+{n + off})"),
    ][index // 2 % 6]
    completion = f"{PROSE}\\boxed{{{answer}}}"
    return RewardInput(completion.replace("\\\\", "\\"), answer=gold.replace("\\\\", "\\"))


def mixed_items(num: int, bombs: Sequence[str]) -> list[RewardInput]:
    """Returns easy items, every hundredth of which is a completion of `bombs`."""
    items = easy_items(num)
    for position in range(0, num, 100):
        items[position] = RewardInput(bombs[position // 100 % len(bombs)], answer="3")
    return items


def math_config() -> RewardConfig:
    return RewardConfig(parts=[RewardPart(kind="math")])


def pool(kinds: Sequence[str], workers: int) -> RewardPool:
    """Returns a pool that has graded once."""
    opened = RewardPool(kinds, workers=workers, log_dir=Path(LOGS.name))
    opened.grade(easy_items(workers * 20), config=math_config())
    return opened


def plain_processes(workers: int) -> ProcessPoolExecutor:
    """Returns processes that have verified once."""
    opened = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    list(opened.map(verify_plainly, easy_items(workers * 20), chunksize=20))
    return opened


def verify_plainly(item: RewardInput) -> bool:
    """Grades as math-verify's page says, without its limits (they need the main thread)."""
    logging.disable(logging.WARNING)
    unlimited: Any = None
    gold = parse(f"${item.answer}$", parsing_timeout=unlimited)
    return verify(gold, parse(item.completion, parsing_timeout=unlimited), timeout_seconds=None)


def run_plainly() -> None:
    subprocess.run([sys.executable, "-c", PRINT], stdout=subprocess.DEVNULL, check=True)


def in_turns(repeats: int, *calls: Callable[[], object]) -> list[float]:
    """Returns the median seconds of each call; they take turns."""
    rounds = [[seconds(call) for call in calls] for _ in range(repeats)]
    return [statistics.median(taken) for taken in zip(*rounds, strict=True)]


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
