"""When a service takes its engine for hung."""

from flows.services import Stalls
from tasks.service_contract import Health


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def busy(progress: int) -> Health:
    return Health(status="ready", message="", busy_s=1.0, progress=progress)


IDLE = Health(status="ready", message="")


def test_an_engine_hangs_that_is_busy_without_progress_for_the_limit():
    clock = Clock()
    stalls = Stalls(limit_s=10.0, clock=clock)
    for at, health, hangs in (
        (0.0, busy(1), False),
        (9.0, busy(1), False),
        (10.5, busy(1), True),
        (11.0, busy(2), False),
        (20.0, busy(2), False),
        (22.0, busy(2), True),
    ):
        clock.now = at
        assert stalls.is_stalled(health) is hangs, at


def test_an_idle_engine_never_hangs_and_a_silent_one_does():
    clock = Clock()
    stalls = Stalls(limit_s=10.0, clock=clock)
    for at in (50.0, 100.0):
        clock.now = at
        assert not stalls.is_stalled(IDLE)
    clock.now = 109.0
    assert not stalls.is_stalled(None)
    clock.now = 111.0
    assert stalls.is_stalled(None)
    stalls.forget()
    assert not stalls.is_stalled(None)
