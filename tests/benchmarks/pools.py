"""What work pools cost and survive: `python tests/benchmarks/pools.py --part overhead`.

Parts, each alone by `--part`, else all: `overhead` of a step by placement, start-up of a
`service`, a `fleet` of services that die, `memory` of a driver, and `failures` with the time until
a run trains again. Services, data and processes are its own and are removed afterwards. Prints a
table for each part; the last line is JSON.
"""

import argparse
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from storage.ledger import commits, read_record
from storage.records import StepCommit
from tests.benchmarks.pools_failures import CASES, measure_failures
from tests.benchmarks.pools_fleet import Load, measure_fleet
from tests.benchmarks.pools_world import START_LIMIT_S, World, moment, settings, world

PARTS = ("fleet", "overhead", "service", "memory", "failures")
PLACEMENTS = ("local", "service", "per-step")
MOST_LETTERS = 24
BOOKED = ("plan_s", "rollout_s", "reward_s", "train_s")


def measure_overhead(world: World, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns medians over the steps after the first, by placement of rollout and train."""
    rows: list[dict[str, Any]] = []
    for where in options.placements:
        run = f"overhead-{where}"
        steps = options.per_step_steps if where == "per-step" else options.steps
        overrides = settings(f"rollout={where}", f"train={where}", small=False)
        flow_run = world.advance(run, steps=steps, overrides=overrides)
        world.finished(flow_run)
        world.cancel_services(run)
        periods = step_periods(world.children(flow_run))
        made = [commit for commit, _ in commits(world.store, run, start=2)]
        parts = [step_parts(world, commit, periods[commit.step]) for commit in made]
        medians = {
            name: round(statistics.median(part[name] for part in parts), 3) for name in parts[0]
        }
        rows.append({"placement": where, "steps": len(parts), **medians})
    return rows


def step_periods(runs: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Returns {step: seconds from its flow run's start to that of what the driver does next}."""
    began = [(run["name"], moment(run["start_time"])) for run in runs if run["start_time"]]
    return {
        int(name.split()[1]): following - start
        for (name, start), (_, following) in itertools.pairwise(began)
        if name.startswith("step ")
    }


def step_parts(world: World, commit: StepCommit, whole: float) -> dict[str, float]:
    """Returns the seconds of a step, which took `whole`, by what was done in it."""
    records = [(ref.stage, read_record(world.store, ref)) for ref in commit.records]
    # Shards in one engine are sampled in turn, or together: then this is more than the clock says.
    sampling = sum(r.timings_s.get("sample") or 0.0 for stage, r in records if "rollout" in stage)
    update = sum(r.timings_s.get("update") or 0.0 for stage, r in records if stage == "train")
    booked = {name: commit.metrics.get(name) or 0.0 for name in BOOKED}
    return {
        "step_s": whole,
        "sampling_s": sampling,
        "update_s": update,
        "overhead_s": whole - sampling - update,
        **booked,
        "rest_s": whole - sum(booked.values()),
    }


def measure_service(world: World, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns how long services take from their flow run's creation to their lease."""
    run = "served"
    world.finished(world.advance(run, steps=1, overrides=settings()))
    rows: list[dict[str, Any]] = []
    for stage in ("rollout", "train"):
        for _ in range(options.starts):
            rows.append(one_start(world, run, stage))
    return rows


def one_start(world: World, run: str, stage: str) -> dict[str, Any]:
    """Starts a service, waits for its lease, and ends it."""
    asked = time.time()
    flow_run = world.pools.start(f"{stage}-service", run=run, idle_s=600)
    world.until(
        lambda: world.service(run, stage),
        f"{stage} service",
        flow_run=flow_run,
        limit_s=START_LIMIT_S,
    )
    there = time.time()
    entered = {s["type"]: moment(s["timestamp"]) for s in world.pools.states(flow_run)}
    world.pools.cancel(flow_run)
    world.pools.ends(flow_run)
    return {
        "stage": stage,
        "start_up_s": round(there - asked, 2),
        "worker_pick_up_s": round(entered["PENDING"] - asked, 2),
        "process_start_s": round(entered["RUNNING"] - entered["PENDING"], 2),
        "engine_s": round(there - entered["RUNNING"], 2),
        "cancelled_within_s": round(time.time() - there, 2),
    }


def measure_memory(world: World, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the resident memory of the driver's process as a run goes on."""
    run, rows = "memory", []
    flow_run = world.advance(run, steps=options.steps, overrides=settings())
    for step in range(options.every, options.steps, options.every):
        commit = world.committed(run, step, flow_run)
        process = world.pools.process_of(flow_run)
        if process is None:
            break
        try:
            rss = process.memory_info().rss
        except psutil.NoSuchProcess:
            break
        rows.append({"step": commit.step, "rss_mib": round(rss / (1 << 20), 1)})
    world.finished(flow_run)
    return rows


def growth(rows: Sequence[dict[str, Any]]) -> float | None:
    """Returns the slope over the second half of the samples, in MiB per 100 steps."""
    later = rows[len(rows) // 2 :]
    if len(later) < 2:
        return None
    steps, sizes = [row["step"] for row in later], [row["rss_mib"] for row in later]
    return round(100 * statistics.linear_regression(steps, sizes).slope, 2)


def show(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints what was measured, a line for each case; texts that need a line stay in the JSON."""
    if not rows:
        return
    names = [
        name
        for name in rows[0]
        if not any(isinstance(row[name], str) and len(row[name]) > MOST_LETTERS for row in rows)
    ]
    table = Table(*names, title=title, box=None)
    for row in rows:
        table.add_row(*("-" if row[name] is None else str(row[name]) for name in names))
    console.print(table)


def on_pools(parts: Sequence[str], options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Measures the parts that need pools, on one stack."""
    console = Console()
    measures = {
        "overhead": measure_overhead,
        "service": measure_service,
        "memory": measure_memory,
        "failures": measure_failures,
    }
    with world() as here:
        for part in parts:
            figures[part] = measures[part](here, options)
            show(console, part, figures[part])
    if "overhead" in figures:
        local, *others = figures["overhead"]
        for row in others:
            more = row["overhead_s"] - local["overhead_s"]
            console.print(
                f"{row['placement']}: {more:+.2f} s of overhead to {local['placement']}, "
                f"ratio {row['overhead_s'] / max(local['overhead_s'], 1e-9):.2f}"
            )
    if "memory" in figures:
        figures["mib_per_100_steps"] = growth(figures["memory"])
        console.print(f"growth: {figures['mib_per_100_steps']} MiB per 100 steps, second half")


def read_options() -> argparse.Namespace:
    """Returns what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--steps", type=int, help="default: overhead 8, memory 200")
    parser.add_argument("--per-step-steps", type=int, default=2, help="overhead, per-step")
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--starts", type=int, default=2, help="service: of each stage")
    parser.add_argument("--shards", type=int, default=64, help="fleet")
    parser.add_argument("--services", type=int, default=8, help="fleet")
    parser.add_argument("--shard-s", type=float, default=1.0, help="fleet: seconds of a shard")
    parser.add_argument("--dying", type=int, default=2, help="fleet: services that are killed")
    parser.add_argument("--kill-after-s", type=float, default=1.6, help="fleet: mid-call")
    parser.add_argument("--every", type=int, default=20, help="memory: steps between samples")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="failures: one")
    parser.add_argument("--failure-steps", type=int, default=8, help="failures: steps of a run")
    parser.add_argument("--outage", type=float, default=60.0, help="failures: seconds of a server")
    return parser.parse_args()


def main() -> None:
    """Measures, prints tables and one JSON line."""
    # SystemExit, so that what was started is brought down.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    options = read_options()
    parts = options.part or list(PARTS)
    figures: dict[str, Any] = {}
    asked = options.steps
    if "fleet" in parts:
        load = Load(
            options.shards, options.services, options.shard_s, options.dying, options.kill_after_s
        )
        with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as directory:
            figures["fleet"] = measure_fleet(load, Path(directory))
        show(Console(), "fleet", figures["fleet"])
    for part in [each for each in PARTS if each in parts and each != "fleet"]:
        options.steps = asked or (200 if part == "memory" else 8)
        on_pools([part], options, figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
