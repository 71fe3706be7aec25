"""What bringing the trainer back costs: `python tests/benchmarks/resume.py addition --steps 24`.

Trains a run without any snapshot after genesis, leaves it at its end (which stores one), and goes
on twice: from that snapshot, and from the step before it, which has none and is replayed from
genesis. Prints the seconds of both and the bytes that a step keeps, by kind. Everything lies in a
directory that is removed afterwards.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.overrides import with_overrides
from flows.recipes import RECIPES
from flows.run import fork_and_train, train_run
from storage.layout import steps_prefix
from storage.ledger import commits, read_commit, read_record
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import StageRecord
from storage.store_config import StoreConfig

NO_SNAPSHOTS = ("train.snapshot_every=1000000", "train.snapshot_after_s=1e9")
FEW_EVALUATIONS = ("evaluate.every=1000000",)


def train_record(store: ObjectStore, run: str, step: int) -> StageRecord:
    """Returns the train record of a committed step."""
    commit, _ = read_commit(store, run, step)
    return read_record(store, next(ref for ref in commit.records if ref.stage == "train"))


def restore_seconds(where: str, target: str, run: str) -> tuple[float, list[str]]:
    """Forks `target`, makes one step, and returns what restoring took and what was noted."""
    step = int(target.partition("@")[2]) + 1
    fork_and_train(target, run=run, steps=1, overrides=NO_SNAPSHOTS, store=where)
    record = train_record(open_store(StoreConfig(uri=where), writing=False), run, step)
    return record.timings_s["restore"] or 0.0, record.notes


def bytes_by_kind(store: ObjectStore, run: str, steps: int) -> dict[str, float]:
    """Returns the bytes that a step keeps, on average over all steps after genesis, by kind."""
    found: dict[str, int] = defaultdict(int)
    first = f"{steps_prefix(run)}{1:08d}/"
    for listed in store.list(steps_prefix(run)):
        if listed.key >= first:
            found[kind(listed.key)] += listed.num_bytes
    return {name: total / steps for name, total in sorted(found.items(), key=lambda i: -i[1])}


def kind(key: str) -> str:
    """Returns what an object of a step is, from its key."""
    name = key.rpartition("/")[2]
    for part, called in (
        ("/policy/", "policy"),
        ("/snapshot/", "snapshot"),
        ("/stages/", "records"),
    ):
        if part in key:
            return called
    return name.partition("-")[0].partition(".")[0]


def main() -> None:
    """Trains, restores both ways, prints the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="addition", choices=sorted(RECIPES))
    parser.add_argument("--steps", type=int, default=24, help="steps that are replayed, plus one")
    arguments = parser.parse_args()
    config = with_overrides(RECIPES[arguments.recipe](), [*NO_SNAPSHOTS, *FEW_EVALUATIONS])
    with tempfile.TemporaryDirectory() as directory:
        where = str(Path(directory) / "store")
        train_run(config, run="whole", steps=arguments.steps, store=where)
        store = open_store(StoreConfig(uri=where), writing=False)
        sizes = bytes_by_kind(store, "whole", arguments.steps)
        last = arguments.steps
        by_snapshot, _ = restore_seconds(where, f"whole@{last}", "by-snapshot")
        by_replay, notes = restore_seconds(where, f"whole@{last - 1}", "by-replay")
        trained = [
            train_record(store, "whole", commit.step).timings_s["update"] or 0.0
            for commit, _ in commits(store, "whole", start=1)
        ]
    report(arguments.recipe, by_snapshot, by_replay, notes, trained, sizes)


def report(
    recipe: str,
    by_snapshot: float,
    by_replay: float,
    notes: list[str],
    trained: list[float],
    sizes: dict[str, float],
) -> None:
    """Prints what was measured."""
    replayed = len(trained) - 1
    table = Table("", "seconds", "per replayed step", box=None)
    table.add_row("restored from a snapshot", f"{by_snapshot:.2f}", "")
    table.add_row("replayed from genesis", f"{by_replay:.2f}", f"{by_replay / replayed:.3f}")
    table.add_row("its update when it was trained", "", f"{statistics.median(trained):.3f}")
    console = Console()
    console.print(table)
    console.print(f"{'; '.join(notes)}; ratio {by_replay / max(by_snapshot, 1e-9):.1f}")
    for name, size in sizes.items():
        console.print(f"  {name:<12}{size:>14,.0f} bytes a step")
    figures = {
        "recipe": recipe,
        "replayed_steps": replayed,
        "by_snapshot_s": by_snapshot,
        "by_replay_s": by_replay,
        "bytes_per_step": sizes,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
