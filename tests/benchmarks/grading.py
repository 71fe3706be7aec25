"""Samples per second of every scoring function, in this process and through the pool.

`python tests/benchmarks/grading.py --help`; the last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rewards import SCORERS, scorer
from rewards.contract import RewardInput
from tasks.reward.contract import RewardConfig, RewardPart
from tasks.reward.pool import RewardPool

PROSE = "Adding both sides we get a longer line of reasoning that nobody reads. " * 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=512, help="samples per call")
    parser.add_argument("--repeats", type=int, default=7, help="calls; the median counts")
    parser.add_argument("--workers", type=int, default=2, help="processes of the pool")
    asked = parser.parse_args()
    figures = {
        kind: _measure(kind, asked.samples, repeats=asked.repeats, workers=asked.workers)
        for kind in sorted(SCORERS)
    }
    print(f"{asked.samples} samples a call, {asked.workers} workers, medians of {asked.repeats}")
    print(f"{'reward':<10}{'direct /s':>12}{'pool /s':>12}{'pool ms':>10}{'start ms':>10}")
    for kind, row in figures.items():
        print(
            f"{kind:<10}{row['direct_per_s']:>12,.0f}{row['pool_per_s']:>12,.0f}"
            f"{row['pool_ms']:>10.1f}{row['start_ms']:>10.0f}"
        )
    print(json.dumps({"benchmark": "grading", "samples": asked.samples, "figures": figures}))


def _measure(kind: str, num_samples: int, *, repeats: int, workers: int) -> dict[str, float]:
    items = _items(kind, num_samples)
    part = RewardPart(kind=kind)
    config = RewardConfig(parts=[part], workers=workers)
    module: Any = scorer(kind)
    settings = module.Config()
    direct_s = _median(lambda: [module.score(item, settings) for item in items], repeats)
    with tempfile.TemporaryDirectory() as logs:
        begin = time.perf_counter()
        with RewardPool([kind], workers=workers, log_dir=Path(logs)) as pool:
            pool.grade(items[:workers], config=config)
            start_s = time.perf_counter() - begin
            pool_s = _median(lambda: pool.grade(items, config=config), repeats)
    return {
        "direct_per_s": num_samples / direct_s,
        "pool_per_s": num_samples / pool_s,
        "pool_ms": pool_s * 1000,
        "start_ms": start_s * 1000,
    }


def _items(kind: str, num_samples: int) -> list[RewardInput]:
    """Half right, half wrong; `math` gets expressions that need algebra."""
    if kind == "math":
        return [
            RewardInput(f"{PROSE}\\boxed{{x^2+{i}x-{i}}}", answer=f"x(x+{i})-{i + i % 2}")
            for i in range(num_samples)
        ]
    return [
        RewardInput(f"<think>{PROSE}</think><answer>{i}</answer>", answer=str(i + i % 2))
        for i in range(num_samples)
    ]


def _median(call: Callable[[], object], repeats: int) -> float:
    seconds: list[float] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
