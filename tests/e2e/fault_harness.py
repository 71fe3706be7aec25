"""A controller under test: `python -m tests.e2e.fault_harness matrix|race --help`.

`matrix` makes one step again and again on forks of one run, with one set of warm engines, while
the gateway between all of it and the store fails at another call each time. `race` advances a run
without holding its lease. Both print one JSON line; neither asserts anything.
"""

import argparse
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import parse_qs

from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from rich.console import Console

import flows.opening
from flows.config import RunConfig
from flows.fork import fork_commit, fork_run
from flows.opening import open_session
from flows.phases import Phase
from flows.placement import Site
from flows.prefect_server import prefect_server
from flows.progress import Lines
from flows.session import Session
from flows.step import step
from flows.stores import resolve_store
from flows.topologies import TOPOLOGIES, Stages
from infra.home import home
from storage.errors import StorageError
from storage.ledger import commits, read_commit, read_plan, read_run
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import StepCommit
from storage.store_config import StoreConfig
from tasks.checkpoint.task import checkpoint
from tasks.errors import Permanent, Transient
from tasks.prompts.task import prompts
from tasks.reward.task import reward
from tasks.rollout.contract import LoadRequest, LoadResult
from tasks.rollout.task import rollout
from tasks.train.task import train
from tasks.workspace import open_workspace
from tests.benchmarks.soak_checks import exactly_once
from tests.e2e.faulty_gateway import Fault, Gateway, Reach, Way, faulty_gateway

TASKS = (prompts, rollout, reward, train, checkpoint)
NUM_RETRIES = rollout.retries
WAYS: tuple[Way, ...] = ("before", "after")
FAILURES = (Transient, Permanent, StorageError)

_ATTEMPT = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


@dataclass
class Case:
    """One try of the step: what was struck, and what came of it."""

    n: int
    """Which call of a step without faults."""
    call: str
    nth: int
    """Which of those with that method and key."""
    way: Way
    reach: Reach
    num_struck: int = 0
    """Requests that were hung up on; 0 if the step did without the call."""
    ended: str = ""
    """`by itself`, or `resumed` after what `error` says."""
    error: str = ""
    digest: str = ""
    broken: list[str] = field(default_factory=list[str])
    """What did not hold; nothing should be here."""
    seconds: float = 0.0


class Said(Lines):
    """Keeps what a person would be told."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True), last=0)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class NoReports:
    """Stands where Prefect artifacts are made: on a thread that reads the store when it likes."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "NoReports":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, commit: StepCommit, *, digest: str, flow_run_id: str | None) -> None:
        pass

    def graded(self, done: int, total: int) -> None:
        pass


class Matrix:
    """The engines of one run, warm, and the forks of it that the cases are made on."""

    def __init__(
        self, gateway: Gateway, store: ObjectStore, config: StoreConfig, *, base: StepCommit
    ) -> None:
        self._gateway = gateway
        self._store = store
        self._store_config = config
        self._base = base
        self._config = RunConfig.model_validate(read_plan(store, base.plan).configs)
        self._stages: Stages | None = None

    @contextmanager
    def warm(self) -> Iterator[None]:
        """Starts the engines, which every session opened in the block then shares."""
        record, _ = read_run(self._store, self._base.run)
        with (
            open_workspace(home()) as workspace,
            TOPOLOGIES["colocated"](
                Site(
                    record=record,
                    config=self._config,
                    store=self._store,
                    store_config=self._store_config,
                    workspace=workspace,
                    say=Said().say,
                    graded=lambda about, done, total: None,
                )
            ) as self._stages,
        ):
            TOPOLOGIES["colocated"] = self._shared
            yield

    @contextmanager
    def _shared(self, *_: object, **__: object) -> Iterator[Stages]:
        assert self._stages is not None, "sessions are opened in the block of `warm`"
        yield self._stages

    def clean(self, run: str) -> list[str]:
        """Makes the step without a fault and returns its requests, in order."""
        self._fork(run)
        error = self._advance(run, None)
        if error:
            raise SystemExit(f"The step failed without any fault: {error}")
        return list(self._gateway.counted)

    def make(self, case: Case, run: str, *, fault: Fault, expected: str) -> None:
        """Makes the step on a new fork, under `fault`, resumes it if need be, and looks at it."""
        began = time.monotonic()
        for each in TASKS:
            # While the store is gone for good they would only cost time.
            each.retries = 0 if fault.reach == "end" else NUM_RETRIES
        self._fork(run)
        case.error = self._advance(run, fault)
        case.ended = "resumed" if case.error else "by itself"
        case.num_struck = len(self._gateway.struck)
        if case.error:
            again = self._advance(run, None)
            case.broken += [f"the resume failed: {again}"] if again else []
        self._examine(case, run, expected)
        case.seconds = round(time.monotonic() - began, 2)

    def _fork(self, run: str) -> None:
        target = f"{self._base.run}@{self._base.step}"
        with open_workspace(home()) as workspace:
            fork_run(self._store, target, run=run, workspace=workspace)
        fork_commit(self._store, run)
        # Nothing of the case before goes on, and the engine holds what this one samples from.
        request = LoadRequest(policy=self._base.policy, config=self._config.rollout)
        with self._shared() as stages:
            stages.rollout.run(request, LoadResult)

    def _advance(self, run: str, fault: Fault | None) -> str:
        """Makes the step as a controller does that finds what is there; returns how it failed."""
        phase = Phase(self._config, self._base.step + 1)
        with open_session(self._store, self._store_config, run, Said(), phase) as session:
            self._gateway.arm(fault)
            error = _failure(lambda: make_steps(session, phase.until))
            _join_load_ahead()
            self._gateway.disarm()
        return error

    def _examine(self, case: Case, run: str, expected: str) -> None:
        made = [commit for commit, _ in commits(self._store, run)]
        steps = [commit.step for commit in made]
        if steps != [self._base.step, self._base.step + 1]:
            case.broken.append(f"commits: {steps}")
            return
        case.digest = made[-1].policy_digest
        if case.digest != expected:
            case.broken.append(f"digest: {case.digest}")
        counts = exactly_once(self._store, run)
        if counts.pop("planned") != self._config.prompts.groups_per_step:
            case.broken.append("groups were not planned, or not read")
        case.broken += [f"{name}: {count}" for name, count in counts.items() if count]


def make_steps(session: Session, until: int) -> None:
    """Advances a session as `rollbook resume` does, but for the lease and evaluations."""
    while session.last_commit.step < until:
        step(session.run.run, session.last_commit.step + 1)


def _failure(call: Callable[[], None]) -> str:
    try:
        call()
    except FAILURES as error:
        return str(error).splitlines()[0]
    return ""


def _join_load_ahead() -> None:
    for thread in threading.enumerate():
        if thread.name == "load-ahead":
            thread.join()


def _short(call: str, run: str) -> str:
    """Returns a call without what is the same, or random, in every case."""
    method, _, path = call.partition(" ")
    key, _, query = path.removeprefix("/").partition("?")
    _, _, key = key.partition("/")
    if "list-type" in query:
        method, key = "LIST", parse_qs(query)["prefix"][0]
    words = [word for word in _ATTEMPT.sub("*", key).split("/") if word not in ("runs", run)]
    words = [word[:8] if len(word.partition(".")[0]) == 64 else word for word in words]
    return f"{method:4} {'/'.join(words)}"


def _pattern(call: str, run: str, *, prefix: str) -> re.Pattern[str]:
    """Returns what matches the same call in any other fork: attempts are random."""
    forks = f"{re.escape(prefix)}-[a-z0-9-]+"
    return re.compile(_ATTEMPT.sub("[0-9a-f]{32}", re.escape(call).replace(re.escape(run), forks)))


def _share(calls: Sequence[str], run: str, asked: argparse.Namespace) -> list[tuple[Case, Fault]]:
    """Returns the cases of this share of the matrix, each with its fault.

    A call is known by its name: its number depends on how threads take turns, and shares are made
    by processes that know nothing of each other. A read has no effect that could outlive its
    answer, so each fails one way, the two ways in turn, unless all are asked for.
    """
    patterns = [_pattern(call, run, prefix=asked.prefix) for call in calls]
    named: list[tuple[str, int, int]] = []
    for index, pattern in enumerate(patterns):
        nth = sum(pattern.fullmatch(call) is not None for call in calls[: index + 1])
        named.append((_short(calls[index], run), nth, index))
    found: list[tuple[Case, Fault]] = []
    for place, (call, nth, index) in list(enumerate(sorted(named)))[asked.share :: asked.shares]:
        both = asked.all or call.startswith(("PUT", "POST", "DELETE"))
        ways: Sequence[Way] = WAYS if both else WAYS[place // 2 % 2 :][:1]
        reached: list[tuple[Way, Reach]] = [(way, asked.reach) for way in ways]
        if asked.lost_every and place // asked.shares % asked.lost_every == 0:
            reached.append((WAYS[place % 2], "end"))
        for way, reach in reached:
            case = Case(index + 1, call, nth, way, reach)
            found.append((case, Fault(patterns[index], nth, way, reach)))
    return sorted(found, key=lambda item: item[0].n)


def matrix(asked: argparse.Namespace) -> dict[str, Any]:
    """Runs the matrix and returns its cases."""
    direct = resolve_store(asked.store, asked.endpoint)
    assert direct.endpoint is not None, "the gateway stands before an S3 server"
    flows.opening.Reports = NoReports
    with faulty_gateway(direct.endpoint) as gateway, _quick_prefect():
        config = direct.model_copy(update={"endpoint": gateway.endpoint})
        store = open_store(config, writing=True)
        base = read_commit(store, asked.base, asked.step)[0]
        expected = read_commit(store, asked.expected, asked.step + 1)[0].policy_digest
        work = Matrix(gateway, store, config, base=base)
        with work.warm():
            clean = f"{asked.prefix}-clean"
            # The first step also fetches what all later ones find in memory.
            work.clean(f"{clean}-first")
            began = time.monotonic()
            calls = work.clean(clean)
            clean_s = time.monotonic() - began
            cases: list[Case] = []
            for case, fault in _share(calls, clean, asked):
                run = f"{asked.prefix}-{case.reach}-{case.n}-{case.way}"
                work.make(case, run, fault=fault, expected=expected)
                cases.append(case)
                if asked.table:
                    print_row(case, head=len(cases) == 1)
    return {
        "calls": sorted(_short(call, clean) for call in calls),
        "clean_s": round(clean_s, 2),
        "seconds": round(time.monotonic() - began, 1),
        "cases": [asdict(case) for case in cases],
    }


@contextmanager
def _quick_prefect() -> Iterator[None]:
    """Prefect as a controller has it, without the pauses that only cost the cases time."""
    for each in TASKS:
        each.retry_delay_seconds = 0
    with prefect_server(), temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


def race(asked: argparse.Namespace) -> dict[str, Any]:
    """Advances a run without its lease, from the moment that a line comes in on stdin."""
    config = resolve_store(asked.store, asked.endpoint)
    store = open_store(config, writing=True)
    record, _ = read_run(store, asked.run)
    phase = Phase(RunConfig.model_validate(record.config), asked.until)
    said = Said()
    with _quick_prefect(), open_session(store, config, asked.run, said, phase) as session:
        request = LoadRequest(policy=session.last_commit.policy, config=phase.config.rollout)
        session.stages.rollout.run(request, LoadResult)
        print("ready", flush=True)
        sys.stdin.readline()
        make_steps(session, asked.until)
        found = session.last_commit.policy_digest
    return {"head": found, "step": asked.until, "said": said.lines}


def print_row(case: Case, *, head: bool) -> None:
    """Prints one case for people, the first one below the head of the table."""
    if head:
        print(f"{'n':>4} {'way':7}{'reach':8}{'hits':>5} {'ended':10}{'equal':6}{'s':>6}  call")
    equal = "NO" if case.broken else "yes"
    print(
        f"{case.n:4} {case.way:7}{case.reach:8}{case.num_struck:5} {case.ended:10}{equal:6}"
        f"{case.seconds:6.1f}  {case.call}",
        flush=True,
    )


def main() -> None:
    """Runs one mode and prints its JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store")
    parser.add_argument("--endpoint")
    modes = parser.add_subparsers(dest="mode", required=True)
    faulty = modes.add_parser("matrix")
    faulty.add_argument("--base", required=True, help="run that the cases fork")
    faulty.add_argument("--step", type=int, required=True, help="where; the next one is made")
    faulty.add_argument("--expected", required=True, help="undisturbed run with the next step")
    faulty.add_argument("--prefix", default="case", help="names of the forks begin with it")
    faulty.add_argument("--reach", choices=["request", "call"], default="call")
    faulty.add_argument("--share", type=int, default=0, help="which part of the calls fail here")
    faulty.add_argument("--shares", type=int, default=1, help="of how many")
    faulty.add_argument(
        "--lost-every", type=int, help="at every so many calls the store is also gone for good"
    )
    faulty.add_argument("--all", action="store_true", help="reads fail both ways, too")
    faulty.add_argument("--table", action="store_true")
    racing = modes.add_parser("race")
    racing.add_argument("--run", required=True)
    racing.add_argument("--until", type=int, required=True)
    asked = parser.parse_args()
    logging.getLogger("storage").setLevel(logging.ERROR)
    result = matrix(asked) if asked.mode == "matrix" else race(asked)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
