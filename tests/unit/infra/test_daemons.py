"""Background processes are recognised by more than their pid."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from infra.daemons import (
    Command,
    Daemon,
    ServiceError,
    free_port,
    free_ports,
    recall,
    spawn,
    start_listening,
    stop,
    wait_until,
)


def sleeper(directory: Path, code: str = "import time; time.sleep(300)") -> Daemon:
    argv = [sys.executable, "-c", code]
    return spawn(Command("sleeper", argv, directory / "sleeper.log", {}, {}))


def test_a_daemon_is_recognised_after_it_was_saved(tmp_path: Path) -> None:
    daemon = sleeper(tmp_path)
    daemon.save(tmp_path / "state.json")
    recalled = recall(tmp_path / "state.json")
    assert recalled == daemon
    assert recalled.is_alive()
    stop(daemon)
    assert not recalled.is_alive()


def test_a_daemon_lives_as_long_as_one_of_its_threads(tmp_path: Path) -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    daemon = sleeper(tmp_path, code)
    deadline = time.monotonic() + 10
    while " Z " not in Path(f"/proc/{daemon.pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert daemon.is_alive()
    stop(daemon)
    assert not daemon.is_alive()
    assert not Path(f"/proc/{daemon.pid}").exists(), "it is collected"


def test_a_killed_daemon_is_not_alive(tmp_path: Path) -> None:
    daemon = sleeper(tmp_path)
    os.kill(daemon.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while daemon.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_another_process_with_the_pid_is_neither_taken_for_it_nor_stopped(tmp_path: Path) -> None:
    innocent = sleeper(tmp_path)
    recycled = replace(innocent, start_ticks=innocent.start_ticks - 100)
    assert not recycled.is_alive()
    stop(recycled)
    assert innocent.is_alive()
    assert not replace(innocent, boot_id="an earlier boot").is_alive()
    stop(innocent)


def test_stopping_ends_what_ignores_the_signal_and_its_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    daemon = sleeper(tmp_path, code)
    log = tmp_path / "sleeper.log"
    wait_until(daemon, lambda: log.read_text().endswith("\n"), limit_s=10)
    child = int(log.read_text())
    stop(daemon, grace_s=0.3)
    assert not daemon.is_alive()
    deadline = time.monotonic() + 5
    while works(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not works(child)


def works(pid: int) -> bool:
    """Whether a process lives; whoever adopted a dead one may not have collected it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_daemon_that_ends_while_starting_is_reported_with_its_log(tmp_path: Path) -> None:
    daemon = sleeper(tmp_path, "print('the disk is on fire')")
    with pytest.raises(ServiceError, match=r"(?s)ended while starting.*the disk is on fire"):
        wait_until(daemon, lambda: False, limit_s=10)


def test_a_daemon_that_never_answers_is_stopped(tmp_path: Path) -> None:
    daemon = sleeper(tmp_path)
    with pytest.raises(ServiceError, match="was not ready after"):
        wait_until(daemon, lambda: False, limit_s=0.2)
    assert not daemon.is_alive()


def test_a_daemon_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from tests.unit.infra.test_daemons import sleeper\n"
        "sleeper(pathlib.Path(sys.argv[1])).save(pathlib.Path(sys.argv[1]) / 'state.json')\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[3]
    )
    daemon = recall(tmp_path / "state.json")
    assert daemon is not None
    assert daemon.is_alive()
    stop(daemon)


def test_a_taken_port_is_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(port) != port
        chosen = free_ports({"s3": port, "filer": port})
        assert port not in chosen.values()
        assert chosen["s3"] != chosen["filer"]
    assert free_port(port) == port


_LISTEN = """
import socket, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    time.sleep(300)
"""


def listener(directory: Path, port: int) -> Daemon:
    argv = [sys.executable, "-c", _LISTEN, str(port)]
    return spawn(Command("listener", argv, directory / "listener.log", {}, {"tcp": port}))


def wait_for_listener(daemon: Daemon) -> None:
    wait_until(daemon, lambda: daemon.listens(daemon.ports["tcp"]), limit_s=20)


def test_a_port_lost_between_choice_and_start_is_replaced(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        choices = [taken.getsockname()[1], free_port()]
        daemon = start_listening(lambda: listener(tmp_path, choices.pop(0)), wait_for_listener)
        assert choices == []
        assert daemon.listens(daemon.ports["tcp"])
        stop(daemon)


def test_a_daemon_that_fails_for_another_reason_is_started_once(tmp_path: Path) -> None:
    ports = [free_port()]

    def start() -> Daemon:
        return replace(sleeper(tmp_path, "raise SystemExit('broken')"), ports={"tcp": ports.pop()})

    with pytest.raises(ServiceError, match="broken"):
        start_listening(start, wait_for_listener)
