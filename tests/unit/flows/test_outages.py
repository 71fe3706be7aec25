"""A run goes on after an outage, and gives up on what is none."""

import httpx
import pytest

from flows.outages import MAX_IN_VAIN, through_outages
from storage.errors import Unavailable
from tasks.errors import Permanent, Transient


class Run:
    """Commits a step a call, and fails as told; the store is away as often as told."""

    def __init__(
        self, *failures: Exception, commits: bool, away: int = 0, away_first: bool = False
    ) -> None:
        self.failures = list(failures)
        self.commits = commits
        self.away = away
        self.away_first = away_first
        self.step = 0
        self.calls = 0
        self.slept = 0.0

    def advance(self) -> str:
        self.calls += 1
        self.step += self.commits
        if self.failures:
            raise self.failures.pop(0)
        return "done"

    def head_step(self) -> int:
        if (self.calls or self.away_first) and self.away:
            self.away -= 1
            raise Unavailable("away")
        return self.step

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def go(self) -> str:
        return through_outages(
            self.advance, head_step=self.head_step, sleep=self.sleep, clock=lambda: self.slept
        )


def test_a_store_that_is_away_for_a_minute_is_waited_for():
    run = Run(Unavailable("gone"), commits=True, away=30)
    assert run.go() == "done"
    assert (run.calls, run.slept) == (2, 60.0)


def test_failures_with_commits_between_them_are_outages():
    assert Run(*[Transient("again")] * 10, commits=True).go() == "done"


def test_the_same_failure_without_a_commit_ends_it():
    run = Run(*[Transient("again")] * 10, commits=False)
    with pytest.raises(Transient):
        run.go()
    assert run.calls == MAX_IN_VAIN


def answered(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://prefect/api/flow_runs/1")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status))


def test_what_is_away_before_the_first_look_is_waited_for():
    run = Run(commits=True, away=3, away_first=True)
    assert run.go() == "done"
    assert (run.calls, run.slept) == (1, 6.0)


@pytest.mark.parametrize("away", [httpx.ConnectError(""), answered(503), answered(429)])
def test_a_prefect_server_that_is_away_is_waited_for(away: Exception):
    run = Run(away, commits=True, away=3)
    assert run.go() == "done"
    assert (run.calls, run.slept) == (2, 6.0)


def test_what_prefect_refuses_is_raised_at_once():
    run = Run(answered(422), commits=True)
    with pytest.raises(httpx.HTTPStatusError):
        run.go()
    assert run.calls == 1


def test_what_a_retry_repeats_is_raised_at_once():
    run = Run(Permanent("broken"), commits=False)
    with pytest.raises(Permanent):
        run.go()
    assert run.calls == 1


def test_a_store_that_stays_away_ends_it():
    run = Run(Unavailable("gone"), commits=True, away=10**9)
    with pytest.raises(Unavailable):
        run.go()
    assert run.slept > 1700
