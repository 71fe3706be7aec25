"""The seam where engines run committed steps again: what `verify --level replay` asks of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from storage.object_store import ObjectStore
from storage.records import RunRecord, StepCommit

Outcome = Literal["to the bit", "within tolerance", "differs", "not comparable", "not checked"]


@dataclass(frozen=True)
class Replayed:
    """How one stage of a committed step came out when an engine ran it again.

    `key` is the record's; `detail` says figures, or where it differs, or why it was not checked.
    `figure` is the largest difference where there is one, and `tolerance` what was allowed.
    """

    stage: str
    key: str
    outcome: Outcome
    detail: str
    figure: float | None = None
    tolerance: float | None = None


class Replayer(Protocol):
    """Runs the stages of a committed step again; warm between calls, asked in step order."""

    def __call__(
        self, run: RunRecord, commit: StepCommit, before: StepCommit | None
    ) -> list[Replayed]:
        """Returns one entry per rollout shard and one for the train stage."""
        ...


@contextmanager
def open_replayer(store: ObjectStore) -> Iterator[Replayer]:
    """Yields what replays the steps of runs in `store`; engines start at the first call."""
    yield replay_step


def replay_step(run: RunRecord, commit: StepCommit, before: StepCommit | None) -> list[Replayed]:
    """Says of every stage that an engine would have to run that none did."""
    return [
        Replayed(ref.stage, ref.key, "not checked", "no engine replays it yet")
        for ref in commit.records
        if ref.stage == "train" or ref.stage.startswith("rollout-")
    ]
