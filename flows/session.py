"""What one controller holds open while it advances a run: store, stages, and who is watching."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flows.config import RunConfig
from flows.progress import Watcher
from flows.reports import Reports
from flows.topologies import Stages
from storage.object_store import ObjectStore
from storage.records import RunRecord, StepCommit
from tasks.workspace import Workspace


@dataclass
class Session:
    """One run, open for advancing. `head` moves with every commit."""

    store: ObjectStore
    run: RunRecord
    run_digest: str
    config: RunConfig
    stages: Stages
    workspace: Workspace
    watcher: Watcher
    reports: Reports
    head: tuple[StepCommit, str] | None

    @property
    def last_commit(self) -> StepCommit:
        """The newest commit; only asked for once genesis is there."""
        assert self.head is not None, "genesis comes first"
        return self.head[0]

    @property
    def last_digest(self) -> str:
        """The digest of the newest commit's bytes."""
        assert self.head is not None, "genesis comes first"
        return self.head[1]


_OPEN: dict[str, Session] = {}


@contextmanager
def registered(session: Session) -> Iterator[Session]:
    """Makes `session` the one that this process's flows of that run find by name.

    Flow parameters must stay small and readable in the UI, so flows are given the run's name.
    """
    _OPEN[session.run.run] = session
    try:
        yield session
    finally:
        del _OPEN[session.run.run]


def session_of(run: str) -> Session:
    """Returns the open session of `run`.

    Raises:
        ValueError: this process has not opened the run; step flows are started by `flows.run`.
    """
    session = _OPEN.get(run)
    if session is None:
        raise ValueError(
            f"Run {run!r} is not open in this process. A step flow runs inside `flows.run`: start "
            f"`rollbook resume {run}` or the `run` deployment instead."
        )
    return session
