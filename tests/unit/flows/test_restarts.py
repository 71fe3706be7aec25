"""What a flow run remembers: where it was to end, what it was to redo, how often it crashed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from flows.phases import Wishes
from flows.restarts import (
    MAX_IDLE_CRASHES,
    NONE_YET,
    Anchor,
    PastState,
    anchored,
    cancelled_meanwhile,
    crashed_in_vain,
)
from infra.automations import RESTART_MESSAGE


@dataclass
class Labels:
    """A memory in this process."""

    values: dict[str, object] = field(default_factory=dict)
    past: list[PastState] = field(default_factory=list)

    def read(self) -> Mapping[str, object]:
        return dict(self.values)

    def write(self, values: Mapping[str, int]) -> None:
        self.values.update(values)

    def states(self) -> list[PastState]:
        return list(self.past)

    def crash(self) -> None:
        self.past += [PastState("RUNNING", ""), PastState("CRASHED", "gone")]


def test_a_flow_run_that_died_half_way_ends_where_it_was_to_end() -> None:
    memory = Labels()
    first = anchored(memory, Anchor(until=13, open_step=11, revision=NONE_YET))
    again = anchored(memory, Anchor(until=15, open_step=13, revision=0))
    assert first == again == Anchor(until=13, open_step=11, revision=NONE_YET)


@pytest.mark.parametrize(("open_step", "revision"), [(12, NONE_YET), (11, 1), (12, 0)])
def test_what_was_redone_or_skipped_once_is_not_done_again(open_step: int, revision: int) -> None:
    anchor = Anchor(until=13, open_step=11, revision=0)
    wishes = Wishes(["seed=1"], skip_step=True, reason="bad data", rebase=True)
    left = anchor.left_of(wishes, open_step=open_step, revision=revision)
    assert left == Wishes(["seed=1"], rebase=True)


def test_what_was_not_yet_redone_still_is() -> None:
    anchor = Anchor(until=13, open_step=11, revision=0)
    wishes = Wishes(redo=True, reason="bad data")
    assert anchor.left_of(wishes, open_step=11, revision=0) == wishes


def test_crashes_without_a_commit_between_them_end_the_flow_run() -> None:
    memory = Labels()
    assert crashed_in_vain(memory, head_step=4) is None
    for _ in range(MAX_IDLE_CRASHES - 1):
        memory.crash()
        assert crashed_in_vain(memory, head_step=4) is None
    memory.crash()
    stop = crashed_in_vain(memory, head_step=4)
    assert stop is not None
    assert stop.startswith("This flow run crashed 3 times in a row after step 4 without committing")


def test_after_that_a_person_may_retry_and_the_count_begins_anew() -> None:
    memory = Labels()
    crashed_in_vain(memory, head_step=NONE_YET)
    for _ in range(MAX_IDLE_CRASHES):
        memory.crash()
    assert crashed_in_vain(memory, head_step=NONE_YET) is not None
    assert crashed_in_vain(memory, head_step=NONE_YET) is None


def test_a_commit_between_crashes_is_progress() -> None:
    memory = Labels()
    for step in range(10):
        assert crashed_in_vain(memory, head_step=step) is None
        memory.crash()


RESTART = [PastState("SCHEDULED", RESTART_MESSAGE), PastState("PENDING", "")]


@pytest.mark.parametrize(
    ("states", "cancelled"),
    [
        (["RUNNING", "CANCELLING", "CRASHED", *RESTART, "RUNNING"], True),
        (["RUNNING", "CRASHED", "CANCELLED", *RESTART, "RUNNING"], True),
        (["RUNNING", "CRASHED", *RESTART, "RUNNING"], False),
        (["RUNNING", "CANCELLED", "SCHEDULED", "PENDING", "RUNNING"], False),
        (["CANCELLED", "SCHEDULED", "RUNNING", "CRASHED", *RESTART, "RUNNING"], False),
        (["SCHEDULED", "PENDING", "RUNNING"], False),
    ],
)
def test_what_was_cancelled_does_not_come_back_by_itself(
    states: list[str | PastState], cancelled: bool
) -> None:
    past = [each if isinstance(each, PastState) else PastState(each, "") for each in states]
    assert cancelled_meanwhile(past) is cancelled
