"""The services of `make up`, real ones: up, again, killed, a port taken, down."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from infra.daemons import Daemon, free_port, recall
from infra.seaweedfs import s3_keys
from storage.objects import exists
from storage.opening import open_store
from storage.store_config import StoreConfig

pytestmark = [pytest.mark.s3, pytest.mark.slow]
REPOSITORY = Path(__file__).parents[2]


def services(home: Path, command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "infra.services", command],
        cwd=REPOSITORY,
        env={**os.environ, "ROLLBOOK_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("services-home")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # Somebody else's server has it: just as well.
            stack.enter_context(socket.create_server(("127.0.0.1", 4200)))
        started = services(home, "up")
    assert started.returncode == 0, started.stdout + started.stderr
    (home / "first-up").write_text(started.stdout)
    yield home
    stopped = services(home, "down")
    assert stopped.returncode == 0, stopped.stderr


def where(home: Path) -> dict[str, str]:
    return json.loads((home / "services.json").read_text())


def use_store(home: Path, monkeypatch: pytest.MonkeyPatch) -> StoreConfig:
    for name, value in s3_keys(Path(where(home)["credentials_path"])).environment().items():
        monkeypatch.setenv(name, value)
    found = where(home)
    return StoreConfig(uri=f"s3://{found['s3_bucket']}/test", endpoint=found["s3_endpoint"])


def test_a_taken_port_is_replaced_and_said(home: Path) -> None:
    assert "port 4200 is taken; Prefect listens on " in (home / "first-up").read_text()
    assert where(home)["prefect_api_url"] != "http://127.0.0.1:4200/api"


def test_prefect_answers_and_its_ui_asks_the_right_api(home: Path) -> None:
    found = where(home)
    assert httpx.get(f"{found['prefect_api_url']}/health").json() is True
    settings = httpx.get(f"{found['prefect_ui_url']}/ui-settings").json()
    assert settings["api_url"] == found["prefect_api_url"]


def test_the_bucket_takes_objects_with_the_keys_of_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(use_store(home, monkeypatch), writing=True)
    store.put("greeting", b"hello")
    assert store.get("greeting") == b"hello"
    assert Path(where(home)["credentials_path"]).stat().st_mode & 0o777 == 0o600


def test_strangers_without_keys_are_refused(home: Path) -> None:
    found = where(home)
    assert httpx.get(f"{found['s3_endpoint']}/{found['s3_bucket']}/").status_code == 403


def test_a_second_up_is_quick_and_changes_nothing(home: Path) -> None:
    before = where(home)
    began = time.monotonic()
    again = services(home, "up")
    assert again.returncode == 0
    assert time.monotonic() - began < 5.0
    assert where(home) == before


def test_what_was_killed_comes_back_with_its_data(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = use_store(home, monkeypatch)
    open_store(config, writing=True).put("kept", b"over a kill")
    names = ("seaweedfs", "postgres", "prefect")
    for name in names:
        daemon = recall(home / "services" / f"{name}.json")
        assert daemon is not None
        os.kill(daemon.pid, signal.SIGKILL)
    assert services(home, "status").returncode == 1
    again = services(home, "up")
    assert again.returncode == 0, again.stderr
    assert services(home, "status").returncode == 0
    config = use_store(home, monkeypatch)
    assert open_store(config, writing=False).get("kept") == b"over a kill"


def test_the_users_own_prefect_profile_is_not_touched(home: Path) -> None:
    assert (home / "prefect").is_dir()
    prefect = recall(home / "services" / "prefect.json")
    assert prefect is not None
    variables = Path(f"/proc/{prefect.pid}/environ").read_bytes().split(b"\0")
    assert f"PREFECT_HOME={home / 'prefect'}".encode() in variables
    assert b"PREFECT_SERVER_ANALYTICS_ENABLED=false" in variables


def test_down_ends_everything_and_leaves_the_data(home: Path) -> None:
    daemons = [recall(file) for file in sorted((home / "services").glob("*.json"))]
    stopped = services(home, "down")
    assert stopped.stdout == "stopped: Prefect, PostgreSQL, SeaweedFS\n"
    assert [daemon for daemon in daemons if daemon and daemon.is_alive()] == []
    assert (home / "postgres" / "PG_VERSION").exists()
    assert services(home, "down").stdout == "stopped: nothing was running\n"


def test_two_homes_that_start_at_once_get_servers_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    port = free_port()
    for home in homes:
        # Both had it last time, and both find it free; S3 wants the same port everywhere.
        before = Daemon("Prefect", 1, 0, "an earlier boot", "", {"http": port})
        (home / "services").mkdir(parents=True)
        before.save(home / "services" / "prefect.json")
    with ThreadPoolExecutor(2) as threads:
        started = list(threads.map(lambda home: services(home, "up"), homes))
    try:
        assert [each.returncode for each in started] == [0, 0], [each.stderr for each in started]
        urls = {where(home)["prefect_api_url"] for home in homes}
        assert len(urls) == 2
        assert f"http://127.0.0.1:{port}/api" in urls
        for home in homes:
            for name, role in (("prefect", "http"), ("seaweedfs", "s3")):
                daemon = recall(home / "services" / f"{name}.json")
                assert daemon is not None
                assert daemon.listens(daemon.ports[role])
            store = open_store(use_store(home, monkeypatch), writing=True)
            assert not exists(store, "owner")
            store.put("owner", str(home).encode())
    finally:
        for home in homes:
            services(home, "down")
