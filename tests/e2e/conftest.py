"""One home, one set of local services and one base model for all end-to-end tests."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from infra.home import home as product_home
from infra.seaweedfs import BUCKET, S3Keys
from storage.store_config import StoreConfig
from tests.contract.s3_servers import seaweed_server
from tests.e2e.planted import ACCESS_KEY, SECRET, CommandLines
from tests.e2e.pool_stack import Pools, pools_in
from tests.e2e.watched import Browser, Watched, opened_browser

ROLLBOOK = Path(sys.executable).with_name("rollbook")


@dataclass(frozen=True)
class Cli:
    """The `rollbook` command with its own home, store and services."""

    home: Path
    store: str
    environment: dict[str, str]

    def __call__(self, *arguments: str, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(ROLLBOOK), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(ROLLBOOK), *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def ok(self, *arguments: str) -> str:
        done = self(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def show(self, run: str) -> dict:
        return json.loads(self.ok("show", run, "--json"))

    def engines(self) -> list[psutil.Process]:
        """Every process of this home's engines and ranks that is still alive."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            environ = process.info["environ"] or {}
            command = " ".join(process.info["cmdline"] or [])
            ours = environ.get("ROLLBOOK_HOME") == str(self.home)
            if ours and ("tasks.service" in command or "tasks.train.worker" in command):
                found.append(process)
        return found


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """The command beside running local services; they end with the session."""
    home = tmp_path_factory.mktemp("home")
    # The cache is content addressed and shared by design: base models are made once per machine.
    shared = product_home() / "cache"
    shared.mkdir(parents=True, exist_ok=True)
    (home / "cache").symlink_to(shared)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
    for name in ("ROLLBOOK_STORE", "ROLLBOOK_ENDPOINT", "AWS_ENDPOINT_URL_S3"):
        environment.pop(name, None)
    environment |= {"ROLLBOOK_HOME": str(home), "COLUMNS": "120"}
    services = [sys.executable, "-m", "infra.services"]
    up = subprocess.run(
        [*services, "up"], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        yield Cli(home=home, store="the local server", environment=environment)
    finally:
        subprocess.run([*services, "down"], env=environment, check=True, timeout=120)


@pytest.fixture(scope="session")
def finished(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in a directory with the run `finished`, for tests that look and for copies.

    Three steps of 16 groups in two shards each, two snapshots and one at the end, two evaluations.
    """
    directory = tmp_path_factory.mktemp("finished") / "store"
    settings = [
        "evaluate.suites.held_out.max_prompts=64",
        "prompts.groups_per_step=16",
        "rollout.groups_per_shard=8",
        "train.snapshot_every=2",
    ]
    words = [f"--set={setting}" for setting in settings]
    place = ("--store", str(directory))
    cli.ok("launch", "addition", "--run", "finished", "--steps", "3", *words, *place)
    return directory


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Local services with work pools; they end with the session."""
    with pools_in(tmp_path_factory.mktemp("pools-home")) as made:
        yield made


@pytest.fixture(scope="session")
def watched(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The run `watched` of three steps, in an S3 store whose secret key is a planted one."""
    keys = S3Keys(ACCESS_KEY, SECRET)
    services = json.loads((cli.home / "services.json").read_text())
    commands = CommandLines()
    with seaweed_server(tmp_path_factory.mktemp("planted-store"), keys) as endpoint:
        signed = Cli(cli.home, f"s3://{BUCKET}/watched", cli.environment | keys.environment())
        settings = ["evaluate.suites.held_out.max_prompts=64", "rollout.groups_per_shard=32"]
        words = [f"--set={setting}" for setting in settings]
        place = ("--store", signed.store, "--endpoint", endpoint)
        with commands.watched():
            done = signed("launch", "addition", "--run", "watched", "--steps", "3", *words, *place)
        assert done.returncode == 0, done.stdout + done.stderr
        yield Watched(
            run="watched",
            steps=3,
            store=StoreConfig(uri=signed.store, endpoint=endpoint),
            keys=keys,
            home=cli.home,
            api_url=services["prefect_api_url"],
            ui_url=services["prefect_ui_url"],
            commands=commands.seen,
            printed=done.stdout + done.stderr,
        )


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real browser without a window. It holds an event loop, so it ends with the module."""
    with opened_browser(screenshots=tmp_path_factory.mktemp("screenshots")) as found:
        yield found


@pytest.fixture(scope="session")
def wait_for() -> Callable[[Callable[[], bool], float], None]:
    """Waits until a condition holds, or fails."""

    def wait(condition: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout} s in vain"
            time.sleep(0.02)

    return wait
