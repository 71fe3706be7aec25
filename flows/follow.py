"""Starts `advance` on the pools and watches it from here: `python -m flows.follow addition`."""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from rich.console import Console

from flows.launch import free_run_name
from flows.overrides import with_overrides
from flows.prefect_server import prefect_server, run_url
from flows.progress import Watcher, watching
from flows.recipes import RECIPES
from flows.show import summarise
from flows.stores import resolve_store, store_options
from flows.terminal import print_next, print_summary
from storage.errors import NotFound, StorageError
from storage.ledger import head, read_commit, read_evals
from storage.object_store import ObjectStore
from storage.opening import open_store

LOOK_EVERY_S = 0.5
SHOWN_STATES = ("Pending", "Running", "Late", "WaitingForWorker", "Crashed", "Scheduled")


@dataclass
class _Seen:
    """What was shown already."""

    step: int = 0
    """Genesis is no step to watch."""
    evaluations: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    state: str = ""
    moved: float = field(default_factory=time.monotonic)


def follow(
    client: SyncPrefectClient, flow_run_id: UUID, store: ObjectStore, run: str, *, watcher: Watcher
) -> FlowRun:
    """Shows what a flow run of `advance` commits until it has ended; returns it as it ended."""
    seen = _Seen()
    while True:
        found = client.read_flow_run(flow_run_id)
        _show_state(found, seen, watcher)
        _show_steps(store, run, seen, watcher)
        if found.state is not None and found.state.is_final() and not found.state.is_crashed():
            return found
        time.sleep(LOOK_EVERY_S)


def _show_state(found: FlowRun, seen: _Seen, watcher: Watcher) -> None:
    state = found.state
    if state is None or state.name == seen.state:
        return
    seen.state = state.name or ""
    if seen.state in SHOWN_STATES:
        watcher.say(f"flow run {found.name}: {seen.state}. {state.message or ''}".rstrip(". "))


def _show_steps(store: ObjectStore, run: str, seen: _Seen, watcher: Watcher) -> None:
    try:
        newest = head(store, run)
        evaluations = read_evals(store, run) if newest else []
    except NotFound:
        return
    last = newest[0].step if newest else -1
    for step in range(seen.step + 1, last + 1):
        now = time.monotonic()
        commit, _ = read_commit(store, run, step)
        watcher.committed(commit, seconds=now - seen.moved)
        seen.step, seen.moved = step, now
    for record in evaluations:
        if (record.policy_version, record.suite) not in seen.evaluations:
            seen.evaluations.add((record.policy_version, record.suite))
            watcher.evaluated(record)


@contextmanager
def _says_how_to_cancel(flow_run_id: UUID) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print(
            "no longer watching; the flow run goes on. To cancel it: "
            f"`prefect flow-run cancel {flow_run_id}`, or in the UI: {run_url(str(flow_run_id))}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        sys.exit(130)


def advance_on_pools(recipe: str, *, run: str | None, steps: int | None) -> int:
    """Runs `advance` on the pools and shows it; returns the exit code.

    Raises:
        ValueError: no such recipe, or no server or store.
        NotFound: the deployment is not there.
    """
    config = with_overrides(RECIPES[recipe](), [])
    where = resolve_store()
    store = open_store(where, writing=False)
    name = run or free_run_name(store, recipe)
    last = steps or config.steps
    parameters: dict[str, Any] = {"run": name, "recipe": recipe, "steps": steps}
    parameters |= {"store": where.uri, "endpoint": where.endpoint}
    with prefect_server(), get_client(sync_client=True) as client:
        started = run_deployment(
            "advance/advance", parameters=parameters, timeout=0, as_subflow=False
        )
        assert isinstance(started, FlowRun), "not awaited here"
        with watching(name, first=1, last=last) as watcher, _says_how_to_cancel(started.id):
            watcher.say(f"watch it: {run_url(str(started.id))}")
            ended = follow(client, started.id, store, name, watcher=watcher)
        url = run_url(str(started.id))
    assert ended.state is not None, "it has ended"
    if not ended.state.is_completed():
        sys.stderr.write(f"error: {ended.state.name}: {ended.state.message}\n")
        return 1
    summary = summarise(store, name, store_config=where, ui_url=url)
    print_summary(summary)
    print_next(summary, store_options=store_options(where.uri, where.endpoint))
    return 0


def main() -> None:
    """Runs the command; a failure ends in one line that says the cause."""
    parser = argparse.ArgumentParser(prog="flows.follow", description=__doc__)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--run", help="Default: RECIPE-N.")
    parser.add_argument("--steps", type=int, help="Default: the recipe's.")
    options = parser.parse_args()
    try:
        sys.exit(advance_on_pools(options.recipe, run=options.run, steps=options.steps))
    except (ValueError, StorageError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
