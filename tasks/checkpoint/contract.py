"""What the checkpoint stage takes and gives: records in, a step commit out."""

from typing import Literal

from storage.layout import StepScope
from storage.records import (
    Cursor,
    Metrics,
    ObjectRef,
    ParentRef,
    Record,
    RecordRef,
    StepCommit,
)


class CheckpointRequest(Record):
    """Commits one step. A train record is absent for kinds `skipped` and `fork`.

    `parent` is set for kind `fork` alone: the commit whose policy, state and cursor are taken.
    """

    scope: StepScope
    kind: Literal["genesis", "train", "skipped", "fork"]
    plan: ObjectRef
    records: list[RecordRef]
    cursor: Cursor
    previous: str
    metrics: Metrics
    parent: ParentRef | None = None


class CheckpointResult(Record):
    """The commit that stands, its digest, and whether this call made it."""

    commit: StepCommit
    digest: str
    ours: bool
