"""What a flow run remembers when Prefect runs it again after a crash, in its own labels.

Labels stay with the flow run whatever process takes it up, and go when it is deleted. The store is
no place for them: they say what was asked of one flow run, not what became of the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient

from flows.phases import Wishes
from infra.automations import RESTART_MESSAGE

MAX_IDLE_CRASHES = 3
"""So many crashes in a row without a new commit end a flow run for good."""
NONE_YET = -1
"""Stands for the step of a run that has no commit, and for the revision of a step without a plan.
"""
_UNTIL, _OPEN_STEP, _REVISION = "rollbook.until", "rollbook.open-step", "rollbook.revision"
_SEEN_STEP, _SEEN_CRASHES = "rollbook.seen-step", "rollbook.seen-crashes"


@dataclass(frozen=True)
class PastState:
    """A state that the flow run was in: Prefect's type, and what it said."""

    kind: str
    message: str


class Memory(Protocol):
    """What outlives the process of a flow run."""

    def read(self) -> Mapping[str, object]:
        """Returns everything that was written."""
        ...

    def write(self, values: Mapping[str, int]) -> None:
        """Adds values, or replaces those of the same name."""
        ...

    def states(self) -> list[PastState]:
        """Returns the states of the flow run so far, oldest first."""
        ...


class FlowRunMemory:
    """The labels and past states of a flow run, on the Prefect server."""

    def __init__(self, client: SyncPrefectClient, flow_run_id: str) -> None:
        self._client = client
        self._id = UUID(flow_run_id)

    def read(self) -> Mapping[str, object]:
        """See `Memory`."""
        return self._client.read_flow_run(self._id).labels

    def write(self, values: Mapping[str, int]) -> None:
        """See `Memory`."""
        self._client.update_flow_run_labels(self._id, dict(values))

    def states(self) -> list[PastState]:
        """See `Memory`."""
        found = self._client.read_flow_run_states(self._id)
        return [
            PastState(state.type.value, state.message or "")
            for state in sorted(found, key=lambda state: state.timestamp)
        ]


@dataclass(frozen=True)
class Anchor:
    """What a flow run was to do, fixed when it first held the lease: steps as numbers of the run.

    `open_step` is the step that came next then and `revision` that of its plan: what was to be
    redone or skipped. `NONE_YET` stands for a plan that was not there.
    """

    until: int
    open_step: int
    revision: int

    def left_of(self, wishes: Wishes, *, open_step: int, revision: int) -> Wishes:
        """Returns what is still to be done of `wishes` now that `open_step` comes next.

        A step that was superseded or committed meanwhile is not redone or skipped a second time,
        and neither is the one after it. Overrides hold on, they change nothing twice.
        """
        if (open_step, revision) == (self.open_step, self.revision):
            return wishes
        return replace(wishes, redo=False, skip_step=False, reason=None)


def anchored(memory: Memory, now: Anchor) -> Anchor:
    """Returns the anchor that this flow run put down earlier, else puts `now` down.

    So a flow run that died half-way and is run again ends where it would have ended.
    """
    known = memory.read()
    if _UNTIL in known:
        return Anchor(
            until=_number(known, _UNTIL),
            open_step=_number(known, _OPEN_STEP),
            revision=_number(known, _REVISION),
        )
    memory.write({_UNTIL: now.until, _OPEN_STEP: now.open_step, _REVISION: now.revision})
    return now


def cancelled_meanwhile(states: Sequence[PastState]) -> bool:
    """Whether a flow run that runs again after a crash was cancelled between its two processes.

    A cancel that finds its process dead ends as a crash, and crashes are run again: what was
    cancelled must not come back by itself. A person's retry is no such thing.
    """
    past = list(states)
    while past and past[-1].kind in ("RUNNING", "PENDING"):
        past.pop()
    if not past or past[-1].message != RESTART_MESSAGE:
        return False
    while past and past[-1].kind != "RUNNING":
        if past.pop().kind in ("CANCELLING", "CANCELLED"):
            return True
    return False


def crashed_in_vain(memory: Memory, *, head_step: int) -> str | None:
    """Returns why a flow run should stop trying: it keeps crashing and commits nothing.

    Call it first in every try. After a stop the count begins anew, so that a person who mended the
    cause can retry.
    """
    known = memory.read()
    crashes = sum(state.kind == "CRASHED" for state in memory.states())
    moved = known.get(_SEEN_STEP) != head_step
    if moved:
        # A crash before the first look counts: nothing came of it.
        before = crashes if _SEEN_STEP in known else 0
        memory.write({_SEEN_STEP: head_step, _SEEN_CRASHES: before})
        return None
    in_vain = crashes - _number(known, _SEEN_CRASHES)
    if in_vain < MAX_IDLE_CRASHES:
        return None
    memory.write({_SEEN_CRASHES: crashes})
    where = "before its first commit" if head_step == NONE_YET else f"after step {head_step}"
    return (
        f"This flow run crashed {in_vain} times in a row {where} without committing anything new. "
        "Expected a commit between two crashes, so it is not started again by itself. Every commit "
        "is kept. Look at the logs of its last tries (memory? disk? the engines' logs beside "
        "them), mend the cause, then press Retry here or start `advance` again."
    )


def _number(known: Mapping[str, object], name: str) -> int:
    value = known[name]
    assert isinstance(value, int), f"label {name} is ours and a number"
    return value
