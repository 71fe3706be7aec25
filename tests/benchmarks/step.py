"""Where a step's time and memory go: `python tests/benchmarks/step.py addition --steps 20`.

Launches the recipe as a user would, watches every process of it, and reads the seconds from the
run's own records and flow runs.
"""

import argparse
import itertools
import json
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from rich.console import Console
from rich.table import Table

from flows.overrides import with_overrides
from flows.prefect_server import prefect_server
from flows.recipes import RECIPES
from flows.run import train_run
from flows.stores import resolve_store
from storage.ledger import commits, read_record
from storage.object_store import ObjectStore
from storage.opening import open_store

TRL_STEP_S = {"addition": 0.77, "smollm2": 23.4}
"""TRL 1.16 on a machine of this size, see the README; a ratio to it holds for such machines."""
STAGES = ("plan", "rollout", "reward", "train", "checkpoint")


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Yields {process: peak resident bytes}, sampled five times a second until the end."""
    peaks: dict[str, int] = defaultdict(int)
    ended = threading.Event()

    def watch() -> None:
        me = psutil.Process()
        while not ended.wait(0.2):
            now: dict[str, int] = defaultdict(int)
            for process in [me, *me.children(recursive=True)]:
                try:
                    now[process_name(process, me.pid)] += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            for name, resident in now.items():
                peaks[name] = max(peaks[name], resident)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


def process_name(process: psutil.Process, controller: int) -> str:
    """Returns which part of the run a process is."""
    if process.pid == controller:
        return "controller"
    command = " ".join(process.cmdline())
    for part, name in (
        ("tasks.train.worker", "train ranks"),
        ("/rollout-", "rollout engine"),
        ("/train-", "train service"),
        ("tasks.reward", "reward workers"),
    ):
        if part in command:
            return name
    return "other"


def flow_runs(parent_url: str | None) -> list[FlowRun]:
    """Returns the step and evaluation flow runs below the run's flow, in order of start."""
    if parent_url is None:
        return []
    parent = FlowRunFilterParentFlowRunId(any_=[parent_url.rpartition("/")[2]])
    with prefect_server(), get_client(sync_client=True) as client:
        found: list[FlowRun] = []
        while page := client.read_flow_runs(
            flow_run_filter=FlowRunFilter(parent_flow_run_id=parent),
            sort=FlowRunSort.START_TIME_ASC,
            limit=200,
            offset=len(found),
        ):
            found += page
    return found


def step_periods(runs: list[FlowRun]) -> dict[int, float]:
    """Returns {step: seconds from its flow's start to the end of the teardown}, start to start."""
    periods: dict[int, float] = {}
    for this, following in itertools.pairwise(runs):
        words = this.name.split()
        if words[0] == "step" and words[1] != "0" and this.start_time and following.start_time:
            periods[int(words[1])] = (following.start_time - this.start_time).total_seconds()
    return periods


def measured_steps(store: ObjectStore, run: str, *, skip: int) -> list[dict[str, float]]:
    """Returns per step: seconds by stage, of generation and of gradient, and tokens."""
    rows: list[dict[str, float]] = []
    for commit, _ in commits(store, run, start=1 + skip):
        records = {ref.stage: read_record(store, ref) for ref in commit.records}
        sampled = [record for stage, record in records.items() if stage.startswith("rollout-")]
        row = {name: commit.metrics.get(f"{name}_s") or 0.0 for name in STAGES}
        row["step"] = commit.step
        row["generation"] = sum(record.timings_s.get("sample") or 0.0 for record in sampled)
        row["gradient"] = records["train"].timings_s.get("update") or 0.0
        row["completion_tokens"] = commit.metrics.get("completion_tokens") or 0.0
        row["train_tokens"] = records["train"].metrics.get("tokens") or 0.0
        rows.append(row)
    return rows


def median(rows: list[dict[str, float]], name: str) -> float:
    """Returns the median of one column."""
    return statistics.median(row[name] for row in rows)


def main() -> None:
    """Runs the benchmark and prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=2, help="first steps left out (warming up)")
    parser.add_argument("--store", help="default: ROLLBOOK_STORE, else the local server")
    parser.add_argument("--endpoint")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    arguments = parser.parse_args()
    config = with_overrides(RECIPES[arguments.recipe](), arguments.overrides)
    run = f"bench-{arguments.recipe}-{os.getpid()}"
    began = time.monotonic()
    with peak_memory() as peaks:
        summary = train_run(
            config,
            run=run,
            steps=arguments.steps,
            store=arguments.store,
            endpoint=arguments.endpoint,
        )
    total = time.monotonic() - began
    store = open_store(resolve_store(arguments.store, arguments.endpoint), writing=False)
    rows = measured_steps(store, run, skip=arguments.skip)
    periods = step_periods(flow_runs(summary.ui_url))
    for row in rows:
        row["period"] = periods.get(int(row["step"]), sum(row[name] for name in STAGES))
        row["outside"] = row["period"] - row["generation"] - row["gradient"]
    report(arguments.recipe, rows, dict(peaks), total)


def report(recipe: str, rows: list[dict[str, float]], peaks: dict[str, int], total: float) -> None:
    """Prints the table and the JSON line."""
    console = Console()
    period = median(rows, "period")
    table = Table(title=f"{recipe}: {len(rows)} steps, medians", box=None)
    table.add_column("part")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name in (*STAGES[:-1], "period", "generation", "gradient", "outside"):
        table.add_row(name, f"{median(rows, name):.3f}", f"{median(rows, name) / period:.1%}")
    console.print(table)
    for name, resident in sorted(peaks.items(), key=lambda item: -item[1]):
        console.print(f"peak memory, {name}: {resident / (1 << 20):.0f} MiB", highlight=False)
    line = {
        "recipe": recipe,
        "steps": len(rows),
        "step_s": round(period, 3),
        **{f"{name}_s": round(median(rows, name), 4) for name in (*STAGES[:-1], "outside")},
        "generation_s": round(median(rows, "generation"), 4),
        "gradient_s": round(median(rows, "gradient"), 4),
        "outside_share": round(median(rows, "outside") / period, 4),
        "sampled_tokens_per_s": round(
            median(rows, "completion_tokens") / max(median(rows, "generation"), 1e-9), 1
        ),
        "trained_tokens_per_s": round(
            median(rows, "train_tokens") / max(median(rows, "gradient"), 1e-9), 1
        ),
        "ratio_to_trl": round(period / TRL_STEP_S[recipe], 3) if recipe in TRL_STEP_S else None,
        "peak_mib": {name: resident >> 20 for name, resident in peaks.items()},
        "total_s": round(total, 1),
    }
    console.print_json(json.dumps(line), indent=None)


if __name__ == "__main__":
    main()
