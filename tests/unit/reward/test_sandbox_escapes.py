"""What a hostile program tries, and what becomes of it; the program runs as it would be graded."""

import errno
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rewards import code
from rewards.contract import Program as Confined
from rewards.contract import ProgramResult, RewardInput, Sandbox, SandboxLimits, Score
from tasks.reward import bubblewrap, seccomp
from tasks.reward.contract import SandboxConfig
from tasks.reward.sandbox import open_sandbox
from tests.unit.reward.zombies import zombies

LIMITS = SandboxLimits(cpu_s=3, asleep_s=3, processes=16)
MARK = f"rollbook-escape-{os.getpid()}"


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    opened = open_sandbox(SandboxConfig(concurrency=4), scratch=tmp_path_factory.mktemp("scratch"))
    yield opened
    opened.close()


def run(sandbox: Sandbox, source: str, limits: SandboxLimits = LIMITS) -> ProgramResult:
    files = {"main.py": textwrap.dedent(source)}
    return sandbox.run(Confined(files, ("python", "-S", "main.py")), limits=limits)


def grade(sandbox: Sandbox, source: str, tests: object, **options: object) -> Score:
    completion = f"```python\n{textwrap.dedent(source)}\n```"
    item = RewardInput(completion, extra={"tests": tests})
    return code.score(item, code.Config.model_validate(options), sandbox)


def ours() -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if MARK in " ".join(_words(each))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


UP = "../" * 64
# What the grader itself may do; each with what the attempt ends with inside.
ALLOWED_OUTSIDE = [
    ("read_the_users", "open('/etc/passwd').read()", "FileNotFoundError"),
    (
        "symlink_out_of_the_folder",
        "import os; os.symlink('/etc/passwd', 'link'); open('link').read()",
        "FileNotFoundError",
    ),
    ("climb_with_dots", f"open('{UP}etc/passwd').read()", "FileNotFoundError"),
    ("write_to_proc", "open('/proc/self/comm', 'w').write('x')", "[Errno 30]"),
    ("memory_that_no_limit_counts", "import os; os.memfd_create('x')", "PermissionError"),
    (
        "memory_that_outlives",
        "import ctypes; c = ctypes.CDLL(None); made = c.shmget(0, 9, 0o1600); "
        "c.shmctl(made, 0, 0); assert made >= 0",
        "AssertionError",
    ),
    ("be_slow_politely", "import os; os.nice(1)", "PermissionError"),
    (
        "run_when_nobody_does",
        "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))",
        "PermissionError",
    ),
    (
        "choose_a_processor",
        "import os; os.sched_setaffinity(0, os.sched_getaffinity(0))",
        "PermissionError",
    ),
]
# What others than root may not do outside either: there it would end with another error.
REFUSED_OTHERWISE_OUTSIDE = [
    ("write_to_the_root", "open('/escaped', 'w')", "[Errno 30]"),
    ("write_to_usr", "open('/usr/escaped', 'w')", "[Errno 30]"),
    ("write_to_dev", "open('/dev/escaped', 'w')", "[Errno 30]"),
    ("become_root", "import os; os.setuid(0)", "[Errno 22]"),
    ("raise_its_limits", "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "ValueError"),
    (
        "reach_the_hypervisor",
        "import socket; socket.socket(40, socket.SOCK_STREAM)",
        "PermissionError",
    ),
    (
        "use_a_rare_family",
        "import socket; socket.socketpair(38, socket.SOCK_SEQPACKET)",
        "PermissionError",
    ),
]


def cases(table: list[tuple[str, str, str]]) -> pytest.MarkDecorator:
    rows = [pytest.param(source, error, id=name) for name, source, error in table]
    return pytest.mark.parametrize(("source", "error"), rows)


def assert_raises_inside(sandbox: Sandbox, source: str, error: str) -> None:
    result = run(sandbox, source)
    assert result.exit_code == 1, result
    assert error in result.stderr.splitlines()[-1]


@cases(ALLOWED_OUTSIDE)
def test_what_the_grader_may_do_raises_inside(
    sandbox: Sandbox, tmp_path: Path, source: str, error: str
) -> None:
    subprocess.run([sys.executable, "-S", "-c", source], cwd=tmp_path, check=True)
    assert_raises_inside(sandbox, source, error)


@cases(REFUSED_OTHERWISE_OUTSIDE)
def test_the_attempt_raises_inside(sandbox: Sandbox, source: str, error: str) -> None:
    assert_raises_inside(sandbox, source, error)


def test_a_file_of_the_grader_is_out_of_reach(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tests.json").write_text("expected")
    assert_raises_inside(sandbox, f"open({str(tmp_path / 'tests.json')!r})", "FileNotFoundError")


def test_every_refused_call_is_refused_by_the_filter(sandbox: Sandbox) -> None:
    """The kernel itself would complain of most of these arguments with another error."""
    column = list(seccomp._ARCHITECTURES).index(platform.machine())
    numbers = {name: pair[column] for name, pair in seccomp._REFUSED.items()}
    numbers["getpid_of_x32"] = seccomp._X32 + 39
    source = f"""
        import ctypes
        libc, bad = ctypes.CDLL(None, use_errno=True), ctypes.c_long(-1)
        for name, number in {numbers}.items():
            ctypes.set_errno(0)
            libc.syscall(ctypes.c_long(number), *[bad] * 6)
            print(name, ctypes.get_errno())
    """
    told = run(sandbox, source).stdout.splitlines()
    assert told == [f"{name} {errno.EPERM}" for name in numbers]


def test_no_namespace_is_the_grader_s(sandbox: Sandbox) -> None:
    names = ("ipc", "mnt", "net", "pid", "user", "uts")
    result = run(sandbox, f"import os\nfor n in {names}: print(os.readlink('/proc/self/ns/' + n))")
    assert result.exit_code == 0, result
    ours = {os.readlink(f"/proc/self/ns/{name}") for name in names}
    assert len(set(result.stdout.split()) - ours) == len(names)


def test_no_privilege_is_there_or_to_be_had(sandbox: Sandbox) -> None:
    lines = run(sandbox, "print(open('/proc/self/status').read())").stdout.splitlines()
    said = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert {said[name] for name in said if name.startswith("Cap")} == {"0" * 16}
    assert said["NoNewPrivs"] == "1"


def test_little_is_mounted_and_less_may_be_written(sandbox: Sandbox) -> None:
    lines = run(sandbox, "print(open('/proc/self/mountinfo').read())").stdout.splitlines()
    mounts = {words[4]: words[5].split(",")[0] for words in map(str.split, lines) if words}
    prefix = os.path.realpath(sys.base_prefix)
    shown = ("/usr", prefix, *bubblewrap._ROOT_FOLDERS, "/etc/ld.so.cache", "/proc", "/dev", "/tmp")
    assert [path for path in mounts if path != "/" and not path.startswith(shown)] == []
    writable = {path for path, how in mounts.items() if how == "rw"}
    devices = {"null", "zero", "full", "random", "urandom", "tty"}
    assert writable == {"/tmp", "/dev/shm", "/dev/pts", *(f"/dev/{name}" for name in devices)}
    listed = run(sandbox, "import os; print(*os.listdir('/dev'))").stdout.split()
    links = {"core", "fd", "ptmx", "stdin", "stdout", "stderr"}
    assert set(listed) - links == {"shm", "pts", *devices}


def test_a_service_of_this_machine_is_out_of_reach(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        result = run(sandbox, f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
        assert result.exit_code == 1
        with pytest.raises(TimeoutError):
            server.accept()


def test_only_its_own_processes_are_in_proc(sandbox: Sandbox) -> None:
    result = run(
        sandbox, "import os; print(sorted(int(n) for n in os.listdir('/proc') if n.isdigit()))"
    )
    assert result.stdout == "[1, 2]\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_signals_do_not_reach_the_grader(sandbox: Sandbox, number: int) -> None:
    attempts = f"""
        import os
        for pid in [os.getppid(), {os.getpid()}, {os.getppid()}, -{os.getpgrp()}]:
            try:
                os.kill(pid, {int(number)})
            except OSError as error:
                print(type(error).__name__)
    """
    result = run(sandbox, attempts)
    assert result.stdout.count("ProcessLookupError") >= 2
    assert run(sandbox, "print(1)").stdout == "1\n"


def test_a_signal_to_every_process_finds_nobody_else(sandbox: Sandbox) -> None:
    bystander = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    result = run(sandbox, "import os; os.kill(-1, 9)")
    assert bystander.poll() is None
    bystander.communicate(b"\n")
    assert "ProcessLookupError" in result.stderr


def test_a_fork_bomb_of_root_is_bounded_and_disturbs_nobody(sandbox: Sandbox) -> None:
    most = 0
    done = threading.Event()

    def count() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, len(ours()))
            time.sleep(0.05)

    counter = threading.Thread(target=count)
    counter.start()
    bomb = f"""
        import os, sys  # {MARK}
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """
    verdicts: list[Score] = []
    neighbour = threading.Thread(
        target=lambda: verdicts.append(
            grade(sandbox, "print(1)", [{"stdin": "", "stdout": "1"}], cpu_s=30)
        )
    )
    source = textwrap.dedent(bomb)
    thread = threading.Thread(target=neighbour.start)
    thread.start()
    program = Confined({}, ("python", "-S", "-c", source))
    result = sandbox.run(program, limits=LIMITS)
    neighbour.join()
    done.set()
    counter.join()
    assert result.killed_by == "cpu"
    # The command also stands in the arguments of bubblewrap's two and of the first process.
    assert most <= LIMITS.processes + 4
    assert verdicts == [Score(1.0)]
    assert ours() == []


def test_double_forked_survivors_of_a_new_session_die_with_the_program(sandbox: Sandbox) -> None:
    source = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for fd in range(3):
                    os.close(fd)
                time.sleep(60)
            os._exit(0)
        os.wait()
    """
    program = Confined({}, ("python", "-S", "-c", f"# {MARK}\n" + textwrap.dedent(source)))
    result = sandbox.run(program, limits=LIMITS)
    assert result.exit_code == 0
    assert ours() == []


def test_nothing_survives_a_grader_that_is_killed(tmp_path: Path) -> None:
    grader = f"""
        import pathlib, sys
        from rewards.contract import Program, SandboxLimits
        from tasks.reward.contract import SandboxConfig
        from tasks.reward.sandbox import open_sandbox
        SLEEPER = "import time\\nwhile 1: time.sleep(.1) #{MARK}"
        sandbox = open_sandbox(SandboxConfig(), scratch=pathlib.Path({str(tmp_path)!r}))
        program = Program({{}}, ("python", "-S", "-c", SLEEPER))
        print("begins", flush=True)
        sandbox.run(program, limits=SandboxLimits(asleep_s=300))
    """
    root = Path(__file__).parents[3]
    for pause_s in (0.0, 0.02, 0.3):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(grader)],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        time.sleep(pause_s)
        process.kill()
        process.communicate()
        deadline = time.monotonic() + 20
        while (left := [each for each in ours() if each.pid != process.pid]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.02)
        assert left == []


def test_filling_the_disk_ends_at_the_folder_s_size(sandbox: Sandbox) -> None:
    source = """
        import os
        for number in range(100):
            for folder in ("/tmp", "/tmp/work", "/dev/shm"):
                try:
                    with open(f"{folder}/{number}", "wb") as file:
                        file.write(bytes(1 << 20))
                except OSError as error:
                    full = error.errno
        names = [entry for entry in os.scandir("/tmp") if entry.is_file()]
        print(full, sum(entry.stat().st_size for entry in names))
    """
    result = run(sandbox, source, SandboxLimits(file_bytes=8 << 20))
    errno, size = result.stdout.split()
    assert errno == "28"
    assert int(size) <= 8 << 20


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_two_hundred_megabytes_of_output_are_cut(sandbox: Sandbox, stream: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = f"import sys\nfor i in range(200): sys.{stream}.write('x' * 2**20)"
    result = run(sandbox, source)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert result.killed_by == "output"
    assert len(getattr(result, stream)) == LIMITS.output_bytes
    assert grown_kib < 50 << 10


MEMORY = [
    ("at_once", "a = bytearray(3 << 30)", None),
    ("endless_recursion_in_c", "a = []\nwhile 1: a = [a] * 2 + [bytearray(1 << 20)]", None),
    (
        "by_many_children",
        "import os, time\nfor _ in range(6):\n  if os.fork() == 0:\n    a = bytearray(b'x') * "
        "(100 << 20)\n    time.sleep(60)\ntime.sleep(60)",
        "memory",
    ),
]


@pytest.mark.parametrize(
    ("source", "killed_by"), [case[1:] for case in MEMORY], ids=[case[0] for case in MEMORY]
)
def test_memory_is_bounded(sandbox: Sandbox, source: str, killed_by: str | None) -> None:
    limits = SandboxLimits(cpu_s=20, asleep_s=20, memory_bytes=300 << 20)
    result = run(sandbox, source, limits)
    assert result.killed_by == killed_by
    assert killed_by or "MemoryError" in result.stderr


def test_millions_of_empty_files_are_memory(sandbox: Sandbox) -> None:
    source = "n = 0\nwhile 1:\n    open(f'/tmp/{n}', 'w').close()\n    n += 1"
    limits = SandboxLimits(cpu_s=60, asleep_s=60, memory_bytes=40 << 20)
    assert run(sandbox, source, limits).killed_by == "memory"


AWAKE = [
    ("a_sign_now_and_then", "import time\nwhile 1: print(1, flush=True); time.sleep(.03)"),
    (
        "a_parent_that_waits_in_the_kernel",
        "import ctypes, os, time\nclone = 220 if os.uname().machine == 'aarch64' else 56\n"
        "if ctypes.CDLL(None).syscall(clone, 0x4011, 0, 0, 0, 0) == 0: time.sleep(99)",
    ),
    (
        "a_little_work",
        "import time\nwhile 1:\n    end = time.process_time() + .008\n"
        "    while time.process_time() < end: pass\n    time.sleep(.04)",
    ),
]


@pytest.mark.parametrize("source", [case[1] for case in AWAKE], ids=[case[0] for case in AWAKE])
def test_looking_awake_does_not_lead_to_the_wall(sandbox: Sandbox, source: str) -> None:
    limits = SandboxLimits(cpu_s=30, asleep_s=0.1, wall_s=90)
    assert run(sandbox, source, limits).killed_by == "asleep"


def test_memory_that_takes_long_to_count_does_not_stop_the_clock(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count_for_long(_: object) -> int:
        time.sleep(2)
        return 0

    monkeypatch.setattr(bubblewrap._Namespace, "shared_bytes", count_for_long)
    source = "import os, time\na = bytearray(b'x') * (40 << 20)\nos.fork()\ntime.sleep(99)"
    limits = SandboxLimits(asleep_s=3, memory_bytes=64 << 20, wall_s=40)
    assert run(sandbox, source, limits).killed_by == "asleep"


def test_who_sleeps_until_the_wall_was_not_kept_from_running(sandbox: Sandbox) -> None:
    limits = SandboxLimits(asleep_s=100, wall_s=3)
    assert run(sandbox, "import time; time.sleep(60)", limits).killed_by == "asleep"


def test_huge_recursion_ends_the_program_only(sandbox: Sandbox) -> None:
    source = "import sys\nsys.setrecursionlimit(10**9)\nf = lambda x: f(x)\nf(repr)"
    deep = (
        "x = []\nfor _ in range(10**6): x = [x]\nimport sys\nsys.setrecursionlimit(10**9)\nrepr(x)"
    )
    assert run(sandbox, source).exit_code != 0
    assert run(sandbox, deep).exit_code != 0
    assert run(sandbox, "print(1)").exit_code == 0


def test_no_variable_of_the_grader_is_in_the_environment(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    result = run(sandbox, "import os; print(sorted(os.environ), open('/proc/1/environ').read())")
    assert result.exit_code == 0, result
    assert "hunter2" not in result.stdout
    assert "AWS" not in result.stdout


def test_no_descriptor_of_the_grader_is_open(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "tests.json"
    secret.write_text("expected")
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        source = """
            import os
            for fd in range(3, 256):
                try:
                    print(fd, os.fstat(fd), os.read(fd, 100))
                except OSError:
                    pass
        """
        assert run(sandbox, source) == ProgramResult(0, "", "")


def test_joined_programs_do_not_see_each_other(sandbox: Sandbox) -> None:
    look = "import os; print(os.listdir('.'), [n for n in os.listdir('/proc') if n.isdigit()])"
    results = sandbox.run_joined(
        Confined({"hostile.py": look}, ("python", "-S", "hostile.py")),
        checker=Confined({"trusted.py": look}, ("python", "-S", "trusted.py")),
        limits=LIMITS,
    )
    assert [result.stdout for result in results] == [
        "['hostile.py'] ['1', '2']\n",
        "['trusted.py'] ['1', '2']\n",
    ]


def test_no_killed_program_stays_a_zombie(sandbox: Sandbox) -> None:
    before = zombies()
    limits = SandboxLimits(asleep_s=0.05)
    for _ in range(25):
        assert run(sandbox, "import time; time.sleep(30)", limits).killed_by == "asleep"
    assert zombies() <= before
