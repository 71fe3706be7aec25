"""A stage's service as a child process: calls, failures, and every way to end."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tasks import client
from tasks.child_process import launch
from tasks.client import Child, ChildSpec, Service
from tasks.errors import Permanent, Transient
from tasks.workspace import Workspace, open_workspace
from tests.unit.service.conftest import REPOSITORY, is_gone
from tests.unit.service.echo_stage import EchoRequest, EchoResult


def test_a_call_reaches_the_engine_and_comes_back(echo: Child) -> None:
    result = echo.run(EchoRequest(text="12 + 30"), EchoResult)
    assert result.text == "12 + 30"
    assert result.pid == echo.pid != os.getpid()


def test_start_returns_while_the_engine_still_starts(
    echo_spec: Callable[..., ChildSpec], workspace: Workspace
) -> None:
    with Child(echo_spec(start_s=2.0), workspace=workspace) as child:
        began = time.monotonic()
        child.start()
        assert time.monotonic() - began < 1.0
        child.wait_ready()
        assert time.monotonic() - began > 2.0


def test_identical_calls_in_flight_join(echo: Child) -> None:
    echo.wait_ready()
    slow = EchoRequest(text="same", seconds=1.0)
    with ThreadPoolExecutor(3) as threads:
        calls = list(threads.map(lambda _: echo.run(slow, EchoResult).calls, range(3)))
    assert calls == [1, 1, 1]
    assert echo.run(slow, EchoResult).calls == 2


def test_different_calls_take_turns(echo: Child) -> None:
    echo.wait_ready()
    requests = [EchoRequest(text=str(i), seconds=0.3) for i in range(3)]
    began = time.monotonic()
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda request: echo.run(request, EchoResult), requests))
    assert time.monotonic() - began >= 0.9
    assert [result.text for result in results] == ["0", "1", "2"]


def test_a_store_out_of_reach_is_transient_and_corruption_is_permanent(echo: Child) -> None:
    with pytest.raises(Transient, match="Unavailable: the store is out of reach"):
        echo.run(EchoRequest(do="unavailable"), EchoResult)
    with pytest.raises(Permanent, match="Corrupt: runs/a/b does not match"):
        echo.run(EchoRequest(do="corrupt"), EchoResult)


def test_a_killed_child_fails_its_call_and_the_next_call_starts_another(echo: Child) -> None:
    before = echo.run(EchoRequest(), EchoResult)
    with pytest.raises(Transient, match="ended by signal 9"):
        echo.run(EchoRequest(do="kill"), EchoResult)
    assert is_gone(before.rank_pid)
    after = echo.run(EchoRequest(text="again"), EchoResult)
    assert after.text == "again"
    assert after.pid != before.pid


def test_a_kill_between_calls_leaves_no_rank_and_the_next_call_works(echo: Child) -> None:
    before = echo.run(EchoRequest(), EchoResult)
    os.kill(before.pid, signal.SIGKILL)
    assert is_gone(before.rank_pid)
    assert echo.run(EchoRequest(text="again"), EchoResult).text == "again"


def test_a_failing_start_names_its_cause_and_its_log(
    echo_spec: Callable[..., ChildSpec], workspace: Workspace
) -> None:
    with Child(echo_spec(fail="no such device: 7"), workspace=workspace) as child:
        with pytest.raises(Permanent, match="no such device: 7") as caught:
            child.run(EchoRequest(), EchoResult)
        assert child.pid is None
    assert "vendor says: the device is on fire" in str(caught.value)
    assert "echo.log" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_engine_that_exits_at_start_is_reported_with_its_last_lines(
    echo_spec: Callable[..., ChildSpec], workspace: Workspace
) -> None:
    with (
        Child(echo_spec(exit=True), workspace=workspace) as child,
        pytest.raises(Permanent, match=r"(?s)exit code 3.*vendor says: good bye"),
    ):
        child.wait_ready()


def test_a_child_that_was_killed_while_it_wrote_its_port_leaves_no_draft(
    echo_spec: Callable[..., ChildSpec], workspace: Workspace
) -> None:
    child = launch(echo_spec(), scratch=workspace.scratch)
    (child.directory / "port.new").write_text("12")
    child.end(grace_s=0.0)
    assert not child.directory.exists()
    child.end(grace_s=0.0)


def fill(directory: Path) -> None:
    with (directory / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_child_whose_files_find_no_room_says_where(
    echo_spec: Callable[..., ChildSpec], small_disk: Path
) -> None:
    with open_workspace(small_disk) as workspace:
        fill(small_disk)
        with Child(echo_spec(), workspace=workspace) as child, pytest.raises(Permanent) as full:
            child.start()
    message = str(full.value)
    assert f"its files in {small_disk / 'scratch'}" in message
    assert "No space left on device. Free space there" in message


def test_a_child_that_dies_while_its_log_finds_no_room_says_where(
    echo_spec: Callable[..., ChildSpec], workspace: Workspace, small_disk: Path
) -> None:
    spec = replace(echo_spec(), log_dir=small_disk / "logs")
    with Child(spec, workspace=workspace) as child:
        child.wait_ready()
        fill(small_disk)
        with pytest.raises(Transient) as died:
            child.run(EchoRequest(do="kill"), EchoResult)
    cause = str(died.value).splitlines()[0]
    assert "was ended by signal 9" in cause
    assert f"The disk of {small_disk / 'logs'} is full (0 bytes free)" in cause


def test_a_missing_interpreter_says_what_to_do(
    echo_spec: Callable[..., ChildSpec], workspace: Workspace, tmp_path: Path
) -> None:
    spec = echo_spec()
    broken = ChildSpec(**{**vars(spec), "python": str(tmp_path / "nowhere" / "python")})
    with pytest.raises(Permanent, match="make install"):
        Child(broken, workspace=workspace).start()


def test_closing_ends_engine_and_ranks_and_lets_the_engine_close(
    echo: Child, tmp_path: Path
) -> None:
    result = echo.run(EchoRequest(), EchoResult)
    echo.close()
    assert is_gone(result.pid, within_s=0.5)
    assert is_gone(result.rank_pid, within_s=0.5)
    assert (tmp_path / "closed").read_text() == "closed"


def test_a_closed_child_starts_no_other(echo: Child) -> None:
    echo.wait_ready()
    echo.close()
    for call in (echo.start, echo.wait_ready, lambda: echo.run(EchoRequest(), EchoResult)):
        with pytest.raises(Permanent, match="was closed"):
            call()
    assert echo.pid is None


def test_a_call_says_what_it_waits_for(
    echo_spec: Callable[..., ChildSpec], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_SAY_EVERY_S", 0.2)
    said: list[str] = []
    with Child(echo_spec(start_s=1.5), workspace=workspace, say=said.append) as child:
        child.run(EchoRequest(), EchoResult)
    assert any("echo: starting the engine" in line for line in said)


def test_an_engine_that_still_starts_is_ended_without_grace(
    echo_spec: Callable[..., ChildSpec], workspace: Workspace
) -> None:
    with Child(echo_spec(start_s=600.0), workspace=workspace) as child:
        child.start()
        pid = child.pid
        assert pid is not None
        # Deaf to SIGTERM, as during an import that holds the interpreter's lock.
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        child.close()
        assert time.monotonic() - began < 2.0
    assert is_gone(pid, within_s=0.5)


def test_closing_during_a_call_does_not_wait_for_it(echo: Child) -> None:
    echo.wait_ready()
    failures: list[BaseException] = []

    def call() -> None:
        try:
            echo.run(EchoRequest(seconds=300.0), EchoResult)
        except Transient as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    echo.close()
    thread.join(10)
    assert time.monotonic() - began < 10
    assert "next call starts another" in str(failures[0])


def test_sigterm_ends_the_service_and_its_ranks(echo: Child) -> None:
    result = echo.run(EchoRequest(), EchoResult)
    os.kill(result.pid, signal.SIGTERM)
    assert is_gone(result.pid)
    assert is_gone(result.rank_pid)


def test_a_wrong_token_is_refused(echo: Child) -> None:
    echo.wait_ready()
    assert echo._process is not None
    address = echo._process.address()
    assert address is not None
    url, token = address
    stranger = Service(url, "guessed")
    with pytest.raises(Permanent, match="401"):
        stranger.run(EchoRequest(), EchoResult)
    stranger.close()
    assert httpx.get(f"{url}/health").status_code == 401
    assert httpx.get(f"{url}/health", headers={"Authorization": f"Bearer {token}"}).is_success


def test_a_request_of_another_stage_is_refused_by_name(echo: Child) -> None:
    with pytest.raises(Permanent, match=r"takes no 'EchoResult'.*EchoRequest"):
        echo.run(EchoResult(text="", pid=1, rank_pid=1, calls=0), EchoResult)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_temporary_files_of_an_engine_end_with_it(
    echo_spec: Callable[..., ChildSpec], workspace: Workspace, end: signal.Signals
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        spec = replace(echo_spec(), home=Path(home))
        with Child(spec, workspace=workspace) as child:
            made = child.run(EchoRequest(do="temporary file"), EchoResult).text
            assert made.startswith(f"{home}/scratch/{child.pid}-")
            assert child.pid is not None
            os.kill(child.pid, end)
            assert is_gone(child.pid)
        # What a killed service leaves is swept by the next one to open a workspace there.
        with open_workspace(Path(home)):
            assert not Path(made).exists()


def test_a_scratch_whose_path_is_too_long_for_sockets_is_no_place_for_temporary_files(
    echo: Child,
) -> None:
    made = Path(echo.run(EchoRequest(do="temporary file"), EchoResult).text)
    assert made.parent == Path(tempfile.gettempdir())
    made.unlink()


def test_secrets_lie_in_files_that_others_cannot_read(echo: Child) -> None:
    echo.wait_ready()
    assert echo._process is not None
    directory = echo._process.directory
    modes = {file.name: file.stat().st_mode & 0o777 for file in directory.iterdir()}
    assert modes == {"token": 0o600, "spec.json": 0o600, "port": 0o600}
    assert directory.stat().st_mode & 0o777 == 0o700


PARENT = """
import pathlib, sys, pickle, time
from tasks.client import Child
from tasks.workspace import open_workspace
from tests.unit.service.echo_stage import EchoRequest, EchoResult
spec = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
with open_workspace(spec.home) as workspace, Child(spec, workspace=workspace) as child:
    child.wait_ready()
    print("ready", flush=True)
    child.run(EchoRequest(seconds=300.0), EchoResult)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_parent_ends(
    number: signal.Signals, echo_spec: Callable[..., ChildSpec], tmp_path: Path
) -> None:
    spec_file = tmp_path / "spec.pickle"
    spec_file.write_bytes(pickle.dumps(echo_spec()))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(spec_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    parent.send_signal(number)
    parent.wait(30)
    parent.stdout.close()
    assert [pid for pid in pids if not is_gone(pid)] == []
