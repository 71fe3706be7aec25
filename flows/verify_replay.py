"""What `verify --level replay` asks of engines: every stage of a step again, and its outcome."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from flows import replay
from storage.object_store import ObjectStore
from storage.records import RunRecord, StepCommit
from storage.store_config import StoreConfig
from tasks.rollout.contract import ReplayResult as RolloutReplayResult
from tasks.train.contract import ReplayRequest
from tasks.train.contract import ReplayResult as TrainReplayResult
from tasks.workspace import Workspace

Outcome = Literal["to the bit", "within tolerance", "differs", "not comparable", "not checked"]
TRAIN_TOLERANCE: float = ReplayRequest.model_fields["tolerance"].default


@dataclass(frozen=True)
class Replayed:
    """How one stage of a committed step came out when an engine ran it again.

    `key` is the record's; `detail` says figures, or where it differs, or why it was not checked.
    `used` is the share of the tolerance that was needed, where one was.
    """

    stage: str
    key: str
    outcome: Outcome
    detail: str
    used: float | None = None


class Replayer(Protocol):
    """Runs the stages of a committed step again; warm between calls, asked in step order."""

    def __call__(self, run: RunRecord, commit: StepCommit) -> list[Replayed]:
        """Returns one entry for the train stage and one per rollout shard."""
        ...


@contextmanager
def open_replayer(
    store: ObjectStore, where: StoreConfig, *, workspace: Workspace
) -> Iterator[Replayer]:
    """Yields what replays the steps of a run and of those it was forked from.

    Engines start at the first call, read only, and end with the block.
    """
    with ExitStack() as stack:
        held: list[replay.Engines] = []

        def run_again(run: RunRecord, commit: StepCommit) -> list[Replayed]:
            if not held:
                # A fork has its parent's model, so one pair of engines serves a whole family.
                opened = replay.open_engines(run, store=where, workspace=workspace)
                held.append(stack.enter_context(opened))
            keys = {ref.stage: ref.key for ref in commit.records}
            found = replay.replay_step(commit, store=store, run=run, engines=held[0])
            return [_replayed(one, keys[one.stage]) for one in found]

        yield run_again


def _replayed(found: replay.Replayed, key: str) -> Replayed:
    if found.outcome == "failed":
        # Exit code 0 must not follow from an engine that died or refused.
        return Replayed(found.stage, key, "differs", f"it cannot be run again: {found.detail}")
    return Replayed(found.stage, key, found.outcome, found.detail, _used(found.result))


def _used(result: RolloutReplayResult | TrainReplayResult | None) -> float | None:
    if isinstance(result, TrainReplayResult):
        return None if result.share is None else result.share / TRAIN_TOLERANCE
    compared = (result.regenerated or result.forced) if result else None
    if result is None or compared is None or compared.max_abs_diff is None:
        return None
    return compared.max_abs_diff / result.tolerance
