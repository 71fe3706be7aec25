import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewards.contract import Program, ProgramResult, Sandbox, SandboxLimits
from tasks.reward import bubblewrap
from tasks.reward.contract import SandboxConfig
from tasks.reward.sandbox import open_sandbox

LIMITS = SandboxLimits(cpu_s=5, asleep_s=5)


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    opened = open_sandbox(SandboxConfig(concurrency=2), scratch=tmp_path_factory.mktemp("scratch"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    config = SandboxConfig(allow_unsandboxed=True)
    return open_sandbox(config, scratch=tmp_path_factory.mktemp("scratch"))


@pytest.fixture(params=["isolated", "plain"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return request.getfixturevalue(request.param)


def run(
    sandbox: Sandbox, source: str, stdin: str = "", limits: SandboxLimits = LIMITS
) -> ProgramResult:
    program = Program({"main.py": source}, ("python", "-S", "main.py"), stdin)
    return sandbox.run(program, limits=limits)


def test_output_errors_and_exit_status_come_back(sandbox: Sandbox) -> None:
    source = "import sys; print(input() * 2); print('e', file=sys.stderr); sys.exit(3)"
    assert run(sandbox, source, "né\n") == ProgramResult(3, "néné\n", "e\n")


def test_files_lie_in_the_folder_of_the_program(sandbox: Sandbox) -> None:
    files = {
        "main.py": "from a.b import c; print(c, open('d').read())",
        "a/b.py": "c = 1",
        "d": "2",
    }
    result = sandbox.run(Program(files, ("python", "-S", "main.py")), limits=LIMITS)
    assert result == ProgramResult(0, "1 2\n", "")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", ""])
def test_a_file_name_that_leads_out_is_refused(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(ValueError, match="leads out"):
        sandbox.run(Program({name: ""}, ("true",)), limits=LIMITS)


def test_a_long_input_that_nobody_reads_holds_nothing_up(sandbox: Sandbox) -> None:
    assert run(sandbox, "print(1)", "x" * (4 << 20)).stdout == "1\n"
    assert run(sandbox, "print(len(input()))", "x" * (4 << 20)).stdout == f"{4 << 20}\n"


def test_input_ends_without_a_terminal(sandbox: Sandbox) -> None:
    result = run(sandbox, "input()")
    assert result.exit_code == 1
    assert "EOFError" in result.stderr


@pytest.mark.parametrize(
    ("source", "killed_by"),
    [
        ("while True: pass", "cpu"),
        ("import time; time.sleep(60)", "asleep"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "asleep"),
        ("import os\nr, w = os.pipe()\nos.read(r, 1)", "asleep"),
        ("import time\nwhile True: time.sleep(0.001)", "asleep"),
        ("while True: print('x' * 10000)", "output"),
        ("import os; os.abort()", "signal"),
        ("import os\nwhile os.fork() == 0: pass\nwhile True: pass", "cpu"),
    ],
    ids=["computes", "sleeps", "stops", "waits", "naps", "floods", "aborts", "forks"],
)
def test_a_program_over_its_limits_is_ended_and_says_by_which(
    isolated: Sandbox, source: str, killed_by: str
) -> None:
    result = run(isolated, source, limits=SandboxLimits(cpu_s=1, asleep_s=1))
    assert (result.exit_code, result.killed_by) == (None, killed_by)


def test_cpu_seconds_of_children_count_together(isolated: Sandbox) -> None:
    # Six children of 0.5 s each: none is over the limit, together they are.
    source = (
        "import os, time, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "for _ in range(6):\n  if os.fork() == 0:\n    while time.process_time() < 0.5: pass\n"
        "    os._exit(0)\ntime.sleep(20)"
    )
    result = run(isolated, source, limits=SandboxLimits(cpu_s=2, asleep_s=15))
    assert result.killed_by == "cpu"


def test_waiting_for_a_processor_is_not_sleep(isolated: Sandbox) -> None:
    busy = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        for _ in range(6 * (os.cpu_count() or 1))
    ]
    try:
        source = "import time\nwhile time.process_time() < 0.5: pass\nprint('done')"
        result = run(isolated, source, limits=SandboxLimits(cpu_s=5, asleep_s=1))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert result.stdout == "done\n", result


def test_surrogates_and_bytes_that_are_no_text_do_no_harm(sandbox: Sandbox) -> None:
    assert run(sandbox, "print('\ud800')").exit_code == 1
    result = run(sandbox, "import sys; sys.stdout.buffer.write(b'\\xff\\x00a')")
    assert result.stdout == "\ufffd\x00a"


def test_a_command_that_is_not_there_is_the_program_s_fault(sandbox: Sandbox) -> None:
    assert sandbox.run(Program({}, ("no-such-command",)), limits=LIMITS).exit_code == 127


def test_joined_programs_talk_until_the_checker_hangs_up(isolated: Sandbox) -> None:
    talk = "import socket; s = socket.socket(fileno=3); "
    hostile = talk + "print(s.recv(9)); s.send(b'answer'); print(s.recv(9))"
    trusted = talk + "s.send(b'question'); print(s.recv(9))"
    ends = isolated.run_joined(
        Program({"a.py": hostile}, ("python", "-S", "a.py")),
        checker=Program({"b.py": trusted}, ("python", "-S", "b.py")),
        limits=LIMITS,
    )
    assert ends == (
        ProgramResult(0, "b'question'\nb''\n", ""),
        ProgramResult(0, "b'answer'\n", ""),
    )


def test_a_joined_program_that_does_not_end_is_ended(isolated: Sandbox) -> None:
    program, checker = isolated.run_joined(
        Program({"a.py": "import time; time.sleep(60)"}, ("python", "-S", "a.py")),
        checker=Program({"b.py": "print(1)"}, ("python", "-S", "b.py")),
        limits=LIMITS,
    )
    assert (program.killed_by, checker.stdout) == ("signal", "1\n")


def test_unsandboxed_programs_are_never_joined(plain: Sandbox) -> None:
    program = Program({}, ("true",))
    with pytest.raises(OSError, match="cannot be joined"):
        plain.run_joined(program, checker=program, limits=LIMITS)


def test_many_threads_share_the_slots(isolated: Sandbox) -> None:
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(run(isolated, f"print({n})").stdout))
        for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(f"{n}\n" for n in range(12))


def test_nothing_is_left_open_after_many_programs(isolated: Sandbox) -> None:
    run(isolated, "print(1)")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        run(isolated, "print(1)")
    assert len(os.listdir("/proc/self/fd")) == before


def test_opening_without_walls_is_loud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_sandbox(SandboxConfig(allow_unsandboxed=True), scratch=tmp_path)
    assert "RUN AS THIS USER" in caplog.text


def test_a_machine_without_bubblewrap_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no bwrap on PATH") as refused:
        open_sandbox(SandboxConfig(), scratch=tmp_path)
    assert "apt-get install bubblewrap" in str(refused.value)
    assert "allow_unsandboxed" in str(refused.value)


def test_a_bubblewrap_that_does_not_work_is_found_by_running_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ValueError, match="No permissions to create new namespace"):
        open_sandbox(SandboxConfig(), scratch=tmp_path)


def test_a_sandbox_that_breaks_later_is_an_error_and_no_verdict(
    isolated: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bubblewrap, "_ROOT_FOLDERS", ())
    with pytest.raises(OSError, match="did not start"):
        run(isolated, "print(1)")
