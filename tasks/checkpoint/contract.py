"""What the checkpoint stage takes and gives: records in, a step commit out."""

from typing import Literal

from storage.layout import StepScope
from storage.records import Cursor, Metrics, ObjectRef, Record, RecordRef, StepCommit


class CheckpointRequest(Record):
    """Commits one step. `train` is absent for kind `skipped`."""

    scope: StepScope
    kind: Literal["genesis", "train", "skipped"]
    plan: ObjectRef
    records: list[RecordRef]
    cursor: Cursor
    previous: str
    metrics: Metrics


class CheckpointResult(Record):
    """The commit that stands, its digest, and whether this call made it."""

    commit: StepCommit
    digest: str
    ours: bool
