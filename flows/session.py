"""What one controller holds open while it advances a run: store, stages, and who is watching."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from flows.config import RunConfig
from flows.progress import Watcher
from flows.reports import Reports
from flows.topologies import Stages
from storage.object_store import ObjectStore
from storage.records import RecordRef, RunRecord, StageRecord, StepCommit
from tasks.train.contract import TrainConfig
from tasks.workspace import Workspace


@dataclass(frozen=True)
class Supersede:
    """How the open step's plan is to be replaced, once, before the step goes on.

    `afresh`: every stage of the step does its work again, whatever records it left.
    """

    kind: Literal["train", "skipped"]
    reason: str
    afresh: bool


@dataclass
class Unsaved:
    """What losing the trainer now would cost: steps and seconds trained since the last snapshot."""

    steps: int = 0
    seconds: float = 0.0

    def due(self, config: TrainConfig) -> bool:
        """Whether the step that is about to train has to store a snapshot."""
        enough = self.steps + 1 >= config.snapshot_every
        return enough or self.seconds >= config.snapshot_after_s

    def trained(self, record: StageRecord, *, seconds: float) -> None:
        """Counts a step that trained; a snapshot in its record starts the count again."""
        saved = record.snapshot is not None
        self.steps = 0 if saved else self.steps + 1
        self.seconds = 0.0 if saved else self.seconds + seconds


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
    unsaved: Unsaved = field(default_factory=Unsaved)
    stop_snapshot: list[RecordRef] = field(default_factory=list[RecordRef])
    """The snapshot record that a graceful stop left at the head; the next commit names it."""
    supersede: Supersede | None = None
    """How to replace the open step's plan; taken by the first step of the session."""
    environment: dict[str, str] | None = None
    """What made the newest train record."""
    rebase: bool = False
    """Whether other bits of a replay under another environment are accepted."""

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
