"""The world of the kill soak: its services, a run's controller, and what the store shows of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from infra.daemons import recall
from infra.home import home as product_home
from infra.seaweedfs import BUCKET, s3_keys
from storage.errors import StorageError
from storage.layout import StepScope, commit_key, run_key
from storage.object_store import ObjectStore
from storage.store_config import StoreConfig

STAGES = ("plan", "rollout", "reward", "train", "commit")
SLOW_TO_MAKE = ("inductor", "models", "torch-extensions", "vllm")
"""What of the product's cache a run starts with."""


class Services:
    """The local services of this soak: an S3 server, PostgreSQL and Prefect, in their own home."""

    def __init__(self, root: Path) -> None:
        self._home = root / "services"
        self._environment = environment(root, self._home)

    def command(self, word: str) -> "subprocess.Popen[str]":
        """Starts `python -m infra.services WORD`."""
        return subprocess.Popen(
            [sys.executable, "-m", "infra.services", word],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def found(self) -> dict[str, str]:
        """Returns where they are."""
        return json.loads((self._home / "services.json").read_text())

    def kill_s3(self) -> None:
        """Ends the S3 server as a crash would."""
        daemon = recall(self._home / "services" / "seaweedfs.json")
        assert daemon is not None
        os.kill(daemon.pid, signal.SIGKILL)

    def variables(self) -> dict[str, str]:
        """Returns what a process needs to use them while any of them may be down."""
        keys = s3_keys(Path(self.found()["credentials_path"]))
        return {
            **keys.environment(),
            "AWS_DEFAULT_REGION": "us-east-1",
            "ROLLBOOK_STORE": f"s3://{BUCKET}",
            "ROLLBOOK_ENDPOINT": self.found()["s3_endpoint"],
            "PREFECT_API_URL": self.found()["prefect_api_url"],
        }

    def store(self) -> StoreConfig:
        """Returns the address of the store; this process must have `variables` set."""
        return StoreConfig(uri=f"s3://{BUCKET}", endpoint=self.found()["s3_endpoint"])


def environment(root: Path, home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
    return kept | {"ROLLBOOK_HOME": str(home), "TMPDIR": str(root / "tmp"), "COLUMNS": "160"}


@contextmanager
def running_services(root: Path) -> Iterator[Services]:
    """Yields services that run; they end with the block."""
    services = Services(root)
    up = services.command("up")
    output, _ = up.communicate()
    if up.returncode:
        raise SystemExit(f"The services did not start:\n{output}")
    try:
        yield services
    finally:
        services.command("down").communicate()


@dataclass
class Controller:
    """A run's controller, started again whenever it has ended before the run is complete."""

    run: str
    steps: int
    home: Path
    log: Path
    environment: dict[str, str]
    overrides: dict[str, str]
    starts: int = 0
    own_exits: list[str] = field(default_factory=list)
    """The last lines of those that ended without being killed, and not in success."""
    process: "subprocess.Popen[bytes] | None" = None

    def start(self, *, exists: bool) -> None:
        """Starts `rollbook launch`, or `resume` if the run is there."""
        rollbook = str(Path(sys.executable).with_name("rollbook"))
        sets = [f"--set={key}={value}" for key, value in self.overrides.items()]
        words = ["resume", self.run]
        if not exists:
            words = ["launch", "addition", "--run", self.run, "--steps", str(self.steps), *sets]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [rollbook, *words],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1

    def ended(self) -> int | None:
        """Returns the exit code, None while it runs; a death of its own is remembered."""
        assert self.process is not None
        code = self.process.poll()
        if code is not None and code > 0:
            self.own_exits.append(_last_line(self.log))
        return code

    def processes(self) -> list[psutil.Process]:
        """Returns every living process of this run's home, the controller included."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter(["environ"]):
            environ = process.info["environ"] or {}
            if environ.get("ROLLBOOK_HOME") == str(self.home):
                found.append(process)
        return found

    def strike(self, victim: str) -> bool:
        """Ends a process of the run by SIGKILL; tells whether it lived."""
        for process in self.processes():
            try:
                if _role(process, self.process) == victim:
                    process.kill()
                    return True
            except psutil.NoSuchProcess:
                continue
        return False


def _role(process: psutil.Process, controller: "subprocess.Popen[bytes] | None") -> str:
    command = " ".join(process.cmdline())
    if controller and process.pid == controller.pid:
        return "controller"
    if "tasks.service" in command and "/rollout-" in command:
        return "rollout"
    if "tasks.train.worker" in command:
        return f"rank {process.environ().get('RANK')}"
    return "other"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


class Progress:
    """What the store holds of the open step, looked at from outside."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store = store
        self._run = run
        self.step = 0
        self.seen: set[str] = set()

    @property
    def stage(self) -> str:
        """The last stage of the open step that left something."""
        return next((stage for stage in reversed(STAGES) if stage in self.seen), "begin")

    def look(self) -> set[str]:
        """Returns what is new since the last look; nothing while the store does not answer."""
        try:
            found = self._of_step(self.step)
        except StorageError:
            return set()
        new = found - self.seen
        self.seen |= found
        if "commit" in found:
            self.step, self.seen = self.step + 1, set()
        return new

    def exists(self) -> bool | None:
        """Tells whether run.json is there; None if the store does not answer."""
        try:
            return any(True for _ in self._store.list(run_key(self._run)))
        except StorageError:
            return None

    def _of_step(self, step: int) -> set[str]:
        prefix = f"{StepScope(run=self._run, step=step).prefix}/"
        found: set[str] = set()
        for listed in self._store.list(prefix):
            name = listed.key.removeprefix(prefix)
            parts = name.split("/")
            if parts[0] == "stages":
                found.add(parts[1].partition("-")[0])
            elif parts[0].startswith("plan-"):
                found.add("plan")
            elif listed.key == commit_key(self._run, step):
                found.add("commit")
        return found & set(STAGES)


def share_cache(home: Path) -> None:
    """Gives a run the parts of the product's cache that take minutes to make, and no policies."""
    cache = home / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    for name in SLOW_TO_MAKE:
        shared = product_home() / "cache" / name
        if shared.is_dir() and not (cache / name).exists():
            (cache / name).symlink_to(shared)
