"""Exactly once while the store fails, controllers race, one sleeps, and a disk fills up."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.home import home as product_home
from infra.seaweedfs import s3_keys
from storage.layout import StepScope, commit_key, record_prefix
from storage.ledger import commits, head
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig
from tests.benchmarks.soak_checks import exactly_once
from tests.e2e.conftest import Cli
from tests.e2e.faulty_gateway import faulty_gateway

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.s3]

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("--set", "train.snapshot_every=2", "--set", "prompts.groups_per_step=16"),
    *("--set", "rollout.groups_per_shard=8", "--set", "evaluate.suites.held_out.max_prompts=8"),
)
GROUPS = 16
BASE = 2
"""The step that every run here is forked from; its snapshot makes a trainer quick to restore."""
LAST = 5
SHARES = 2
"""Processes that divide the matrix: most of a case is waiting for a backend that tries again."""
Wait = Callable[[Callable[[], bool], float], None]
Harness = subprocess.Popen[str]


@pytest.fixture(scope="module")
def services(cli: Cli) -> dict[str, str]:
    """Variables with which any process finds the store and Prefect of the session."""
    found = json.loads((cli.home / "services.json").read_text())
    return {
        **s3_keys(Path(found["credentials_path"])).environment(),
        "AWS_DEFAULT_REGION": "us-east-1",
        "ROLLBOOK_STORE": f"s3://{found['s3_bucket']}",
        "ROLLBOOK_ENDPOINT": found["s3_endpoint"],
        "PREFECT_API_URL": found["prefect_api_url"],
    }


@pytest.fixture(scope="module")
def store(services: dict[str, str]) -> Iterator[ObjectStore]:
    """The session's S3 server, for a look from outside."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in services.items():
            if name.startswith("AWS"):
                patch.setenv(name, value)
        config = StoreConfig(uri=services["ROLLBOOK_STORE"], endpoint=services["ROLLBOOK_ENDPOINT"])
        yield open_store(config, writing=False)


@pytest.fixture(scope="module")
def expected(cli: Cli, store: ObjectStore) -> list[str]:
    """The policy digests of steps 2 to 5 when nothing goes wrong."""
    cli.ok("launch", "addition", "--run", "base", "--steps", str(BASE), *SMALL)
    cli.ok("fork", "base", "--run", "undisturbed", "--steps", str(LAST - BASE))
    return policy_digests(store, "undisturbed")


def policy_digests(store: ObjectStore, run: str) -> list[str]:
    """Reads a fork's commits, whose chain is checked on the way."""
    return [commit.policy_digest for commit, _ in commits(store, run)]


def check_run(store: ObjectStore, run: str, expected: list[str]) -> None:
    assert policy_digests(store, run) == expected
    counts = exactly_once(store, run)
    planned = counts.pop("planned")
    assert planned == GROUPS * (len(expected) - 1)
    assert not any(counts.values()), counts


@pytest.fixture
def start_harness(cli: Cli) -> Iterator[Callable[..., Harness]]:
    """Starts controllers of the harness, which end with the test."""
    started: list[Harness] = []

    def start(*arguments: str) -> Harness:
        harness = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.fault_harness", *arguments],
            cwd=ROOT,
            env=cli.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(harness)
        return harness

    yield start
    for harness in started:
        harness.kill()
        harness.communicate()


def answer_of(harness: Harness, *, timeout: float) -> dict[str, Any]:
    output, errors = harness.communicate(timeout=timeout)
    assert harness.returncode == 0, errors
    return json.loads(output.strip().splitlines()[-1])


@pytest.mark.timeout(1500)
def test_every_store_call_of_a_step_may_fail_before_or_after_it_acts(
    cli: Cli, expected: list[str], wait_for: Wait, start_harness: Callable[..., Harness]
):
    """Each call of controller and engines fails once; after some the store stays away for good."""
    shares = [
        start_harness(
            *("matrix", "--base", "base", "--step", str(BASE), "--expected", "undisturbed"),
            *("--prefix", f"share-{share}", "--share", str(share), "--shares", str(SHARES)),
            *("--lost-every", "7"),
        )
        for share in range(SHARES)
    ]
    answers = [answer_of(share, timeout=1400) for share in shares]
    cases = [case for answer in answers for case in answer["cases"]]
    assert not [case for case in cases if case["broken"]]
    assert not [case for case in cases if not case["num_struck"]]
    assert {case["ended"] for case in cases} == {"by itself", "resumed"}
    calls = answers[0]["calls"]
    struck = {(case["call"], case["nth"]) for case in cases}
    assert sorted(call for call, _ in struck) == calls
    lost = [(case["call"], case["way"]) for case in cases if case["reach"] == "call"]
    writes = [call for call in calls if call.startswith("PUT")]
    assert {(call, way) for call in writes for way in ("before", "after")} <= set(lost)
    assert any(call.endswith("commit.json") for call in writes)
    wait_for(lambda: not cli.engines(), 20)


def test_two_controllers_that_race_past_their_lease_make_one_history(
    cli: Cli,
    store: ObjectStore,
    expected: list[str],
    wait_for: Wait,
    start_harness: Callable[..., Harness],
):
    cli.ok("fork", "base", "--run", "raced")
    racers = [start_harness("race", "--run", "raced", "--until", str(LAST)) for _ in range(2)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [answer_of(racer, timeout=240) for racer in racers]
    assert [answer["head"] for answer in answers] == [expected[-1]] * 2
    # Every step was made official by one of the two, and the other says that it adopted it.
    adopted = [line for answer in answers for line in answer["said"] if "adopted it" in line]
    assert sorted(line.split()[1] for line in adopted) == ["3", "4", "5"], answers
    check_run(store, "raced", expected)
    wait_for(lambda: not cli.engines(), 20)


@pytest.mark.parametrize(
    ("asleep_in", "after"),
    [("rollout", ("rollout-0000",)), ("train", ("reward-0000", "reward-0001"))],
    ids=["in rollout", "in train"],
)
def test_a_controller_that_sleeps_through_anothers_steps_does_no_harm(
    cli: Cli,
    store: ObjectStore,
    expected: list[str],
    wait_for: Wait,
    asleep_in: str,
    after: tuple[str, ...],
):
    run = f"asleep-in-{asleep_in}"
    cli.ok("fork", "base", "--run", run)
    first = cli.start("resume", run, "--steps", str(LAST - BASE))
    asleep: list[psutil.Process] = []
    try:
        asleep = sleep_in_mid_step(cli, store, run, after, controller=first, wait_for=wait_for)
        # Its lease is still there: the second one waits until it has seen no sign of life for 10 s.
        done = commit_now(store, run)
        cli.ok("resume", run, "--steps", str(LAST - done))
        assert policy_digests(store, run) == expected
        send(asleep, signal.SIGCONT)
        output, _ = first.communicate(timeout=120)
    finally:
        send(asleep, signal.SIGCONT)
        first.kill()
    said = output.strip().splitlines()
    if first.returncode:
        assert said[-1].startswith("error: Another controller took run"), output
        assert f"rollbook resume {run}" in said[-1]
    else:
        assert "adopted it" in output
    check_run(store, run, expected)
    wait_for(lambda: not cli.engines(), 20)


@pytest.fixture
def small(cli: Cli, services: dict[str, str], tmp_path: Path) -> Iterator[Cli]:
    """The command with a home on a disk of its own of 48 MiB, beside the session's services."""
    home = tmp_path / "small"
    home.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(home)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    (home / "cache").mkdir()
    # Compiled for minutes, and nothing of any run.
    compiled = "torch-extensions"
    (home / "cache" / compiled).symlink_to(product_home() / "cache" / compiled)
    environment = {**cli.environment, **services, "ROLLBOOK_HOME": str(home)}
    yield Cli(home=home, store="the local server", environment=environment)
    subprocess.run(["umount", "--lazy", str(home)], check=True)


def test_a_disk_that_fills_up_is_named_and_costs_nothing_but_time(
    cli: Cli, small: Cli, store: ObjectStore, expected: list[str], wait_for: Wait
):
    cli.ok("fork", "base", "--run", "crammed")
    process = small.start("resume", "crammed", "--steps", str(LAST - BASE))
    scope = StepScope(run="crammed", step=BASE + 2)
    wait_for(lambda: exists(store, record_prefix(scope, "rollout-0000")), 240)
    filler = fill(small.home)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    check_names_the_disk(output, small.home)
    wait_for(lambda: not small.engines(), 20)
    refused = small("resume", "crammed", "--steps", "1")
    assert refused.returncode == 1
    check_names_the_disk(refused.stderr, small.home)
    assert not small.engines()
    filler.unlink()
    small.ok("resume", "crammed", "--steps", str(LAST - commit_now(store, "crammed")))
    check_run(store, "crammed", expected)
    wait_for(lambda: not small.engines(), 20)


def test_a_bucket_that_turns_read_only_is_named_and_costs_nothing_but_time(
    cli: Cli, services: dict[str, str], store: ObjectStore, expected: list[str], wait_for: Wait
):
    cli.ok("fork", "base", "--run", "sealed")
    with faulty_gateway(services["ROLLBOOK_ENDPOINT"]) as gateway:
        environment = cli.environment | services | {"ROLLBOOK_ENDPOINT": gateway.endpoint}
        through = Cli(home=cli.home, store=cli.store, environment=environment)
        process = through.start("resume", "sealed", "--steps", str(LAST - BASE))
        scope = StepScope(run="sealed", step=BASE + 2)
        wait_for(lambda: exists(store, record_prefix(scope, "rollout-0000")), 240)
        gateway.read_only = True
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 1, output
        check_names_the_denial(output)
        wait_for(lambda: not through.engines(), 20)
        refused = through("resume", "sealed", "--steps", "1")
        assert refused.returncode == 1
        check_names_the_denial(refused.stderr)
        assert not through.engines()
        gateway.read_only = False
        through.ok("resume", "sealed", "--steps", str(LAST - commit_now(store, "sealed")))
    check_run(store, "sealed", expected)
    wait_for(lambda: not through.engines(), 20)


def check_names_the_denial(output: str) -> None:
    cause = output.strip().splitlines()[-1]
    assert cause.startswith("error: "), output
    assert re.search(r"denies PutObject of \S+ \(AccessDenied\)", cause), output


def check_names_the_disk(output: str, home: Path) -> None:
    cause = output.strip().splitlines()[-1]
    assert cause.startswith("error: "), output
    assert "No space left on device" in cause
    assert str(home) in cause
    assert "Free space there" in cause
    assert "resume" in cause


def fill(directory: Path) -> Path:
    """Writes until nothing fits any more; returns the file to delete."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    return filler


def commit_now(store: ObjectStore, run: str) -> int:
    newest = head(store, run)
    assert newest is not None
    return newest[0].step


def sleep_in_mid_step(
    cli: Cli,
    store: ObjectStore,
    run: str,
    after: tuple[str, ...],
    *,
    controller: "subprocess.Popen[str]",
    wait_for: Wait,
) -> list[psutil.Process]:
    """Stops a controller with its engines once a step has those records and no commit."""
    for step in range(BASE + 1, LAST):
        scope = StepScope(run=run, step=step)
        wait_for(
            lambda scope=scope: all(exists(store, record_prefix(scope, s)) for s in after), 240
        )
        processes = [psutil.Process(controller.pid), *cli.engines()]
        send(processes, signal.SIGSTOP)
        if not exists(store, commit_key(run, step)):
            return processes
        # It was quicker than we looked: try the next step.
        send(processes, signal.SIGCONT)
    raise AssertionError(f"no step of {run} was caught before its commit")


def exists(store: ObjectStore, prefix: str) -> bool:
    return next(iter(store.list(prefix)), None) is not None


def send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
