"""Starts the echo stage as the product starts an engine."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage.inputs import put_input
from storage.opening import open_store
from storage.records import InputRef
from storage.store_config import StoreConfig
from tasks.client import Child, ChildSpec
from tasks.workspace import Workspace, open_workspace

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    with open_workspace(tmp_path / "home") as workspace:
        yield workspace


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(uri=str(tmp_path / "store"))


@pytest.fixture
def model(tmp_path: Path, store: StoreConfig) -> InputRef:
    file = tmp_path / "config.json"
    file.write_text("{}")
    return put_input(open_store(store, writing=True), {"config.json": file})


@pytest.fixture
def echo_spec(tmp_path: Path, store: StoreConfig, model: InputRef) -> Callable[..., ChildSpec]:
    def make(**config: Any) -> ChildSpec:
        files = {
            "pid_file": str(tmp_path / "pids"),
            "closed_file": str(tmp_path / "closed"),
        }
        return ChildSpec(
            name="echo",
            stage="tests.unit.service.echo_stage",
            engine="tests.unit.service.echo_stage",
            config=files | config,
            model=model,
            store=store,
            home=tmp_path / "home",
            log_dir=tmp_path / "home" / "logs" / "some-run",
            environment={"PYTHONPATH": str(REPOSITORY)},
        )

    return make


@pytest.fixture
def echo(echo_spec: Callable[..., ChildSpec], workspace: Workspace) -> Iterator[Child]:
    with Child(echo_spec(), workspace=workspace) as child:
        yield child


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def is_gone(pid: int, *, within_s: float = 10.0) -> bool:
    """Tells whether a process ends in time; a zombie has ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid):
            return True
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
