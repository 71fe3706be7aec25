"""Work pools of a benchmark's own, and what it reads of the runs on them."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from flows.stores import resolve_store
from infra.daemons import ServiceError
from infra.prefect_api import call
from storage.errors import StorageError
from storage.lease_watch import LeaseWatch
from storage.leases import LeaseState
from storage.ledger import head
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import StepCommit
from tests.e2e.pool_stack import FINAL, SMALL, Pools, pools_in

T = TypeVar("T")

POLL_S = 0.1
START_LIMIT_S = 300.0
RUN_LIMIT_S = 1800.0


class World:
    """Pools, and the store that their runs are in, read from this process."""

    def __init__(self, pools: Pools, store: ObjectStore) -> None:
        self.pools = pools
        self.store = store

    def advance(self, run: str, *, steps: int, overrides: list[str]) -> str:
        """Starts a flow run that trains `addition`; returns its id."""
        return self.pools.start(
            "advance", run=run, recipe="addition", steps=steps, overrides=overrides
        )

    def finished(self, flow_run: str) -> dict[str, Any]:
        """Waits for a flow run that must complete, and returns its state."""
        ended = self.pools.ends(flow_run, timeout=RUN_LIMIT_S)
        if ended["type"] != "COMPLETED":
            raise RuntimeError(f"Flow run {flow_run} ended as {ended['name']}: {ended['message']}")
        return ended

    def newest(self, run: str) -> StepCommit | None:
        """Returns the newest commit of a run; None before the first or while nothing answers."""
        try:
            found = head(self.store, run)
        except StorageError:
            return None
        return found[0] if found else None

    def committed(self, run: str, step: int, flow_run: str) -> StepCommit:
        """Waits until a step is committed."""

        def look() -> StepCommit | None:
            commit = self.newest(run)
            return commit if commit and commit.step >= step else None

        return self.until(look, f"step {step} of {run}", flow_run=flow_run)

    def service(self, run: str, stage: str) -> LeaseState | None:
        """Returns the lease of a living service of a run."""
        found = LeaseWatch(self.store, run, f"{stage}-service-").living()
        return found[0] if found else None

    def state(self, flow_run: str) -> dict[str, Any] | None:
        """Returns the state of a flow run, or None while the server does not answer."""
        try:
            return self.pools.state(flow_run)
        except (ServiceError, OSError):
            return None

    def children(self, flow_run: str) -> list[dict[str, Any]]:
        """Returns the flow runs directly below a flow run, in order of start."""
        body = {
            "flow_runs": {"parent_flow_run_id": {"any_": [flow_run]}},
            "sort": "START_TIME_ASC",
            "limit": 200,
        }
        return call(self.pools.api, "POST", "/flow_runs/filter", body)

    def cancel_services(self, run: str) -> None:
        """Ends the services of a run, as a person would, and waits until they are gone."""
        living = LeaseWatch(self.store, run, "").living()
        for lease in living:
            if "-service-" in lease.role:
                self.pools.cancel(str(lease.holder["flow_run_id"]))
        for lease in living:
            if "-service-" in lease.role:
                self.pools.ends(str(lease.holder["flow_run_id"]))

    def until(
        self, look: Callable[[], T | None], what: str, *, flow_run: str, limit_s: float = 600.0
    ) -> T:
        """Polls until `look` returns something.

        Raises:
            RuntimeError: the flow run ended without it, or it took too long.
        """
        deadline = time.monotonic() + limit_s
        state, ended = None, False
        while (found := look()) is None:
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"No {what} in time; flow run {flow_run}: {state}.")
            time.sleep(POLL_S)
            state = self.state(flow_run)
            ended = state is not None and state["type"] in FINAL
        return found


@contextmanager
def world() -> Iterator[World]:
    """Brings pools up in a new home, and down and away at the end."""
    directory = Path(tempfile.mkdtemp(prefix="rollbook-bench-"))
    before = {name: os.environ.pop(name, None) for name in ("ROLLBOOK_STORE", "ROLLBOOK_ENDPOINT")}
    before["ROLLBOOK_HOME"] = os.environ.get("ROLLBOOK_HOME")
    try:
        with pools_in(directory) as pools:
            os.environ["ROLLBOOK_HOME"] = str(directory)
            yield World(pools, open_store(resolve_store(), writing=False))
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(directory, ignore_errors=True)


def moment(text: str) -> float:
    """Returns a time stamp of Prefect or of a record in seconds since 1970."""
    return datetime.fromisoformat(text).timestamp()


def settings(*placement: str, small: bool = True) -> list[str]:
    """Returns overrides: a small `addition` unless told otherwise, and a placement."""
    return [*(SMALL if small else []), *(f"placement.{each}" for each in placement)]
