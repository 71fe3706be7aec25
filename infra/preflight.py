"""Checks, before anything is downloaded, that this machine can run Rollbook's local setup.

`python3 -m infra.preflight`: standard library only, and readable by any Python 3.9 or newer,
because it is what tells people that theirs is too old.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)
_CANDIDATES = ("python3.11", "python3.12", "python3.13", "python3", "python")
_GIB = 1 << 30
_MIN_MEMORY_BYTES = 6 * _GIB
_MIN_DISK_BYTES = 10 * _GIB
_TESTED_GLIBC = (2, 28)

_ASK = (
    "import importlib.util as u, os, sys, sysconfig; "
    "headers = os.path.join(sysconfig.get_paths()['include'], 'Python.h'); "
    "print(sys.version_info[0], sys.version_info[1], "
    "int(bool(u.find_spec('venv') and u.find_spec('ensurepip'))), int(os.path.exists(headers)))"
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    remedy: str | None = None
    """What to do about it; None if it is fine."""
    fatal: bool = True


@dataclass(frozen=True)
class Interpreter:
    """A Python of this machine."""

    path: str
    version: tuple[int, int]
    makes_environments: bool
    """Has the modules venv and ensurepip."""
    has_headers: bool
    """Has Python.h, which DeepSpeed's communication op is compiled against."""

    @property
    def is_usable(self) -> bool:
        """Whether both environments can be made with it."""
        return self.is_supported and self.makes_environments and self.has_headers

    @property
    def is_supported(self) -> bool:
        """Whether its version is one that we run on."""
        return OLDEST <= self.version <= NEWEST


def find_python() -> Interpreter | None:
    """Returns the best Python of this machine: the running one and those on PATH are asked.

    Usable before merely supported, then the oldest supported version, because the pinned versions
    are tested on it. None if there is no supported one.
    """
    asked = [_ask(path) for path in _interpreter_paths()]
    supported = [each for each in asked if each and each.is_supported]
    return min(supported, key=lambda each: (not each.is_usable, each.version), default=None)


def check(root: Path) -> list[Finding]:
    """Looks at everything that the setup under `root` needs."""
    return [
        _check_platform(),
        _check_cpu(),
        _check_python(find_python()),
        _check_compiler(),
        _check_memory(),
        _check_disk(root),
        _check_root_tools(),
        _check_sandbox(),
    ]


def _interpreter_paths() -> list[str]:
    paths = [sys.executable]
    for name in _CANDIDATES:
        for directory in os.environ.get("PATH", "").split(os.pathsep):
            path = shutil.which(name, path=directory)
            if path and path not in paths:
                paths.append(path)
    return paths


def _ask(path: str) -> Interpreter | None:
    try:
        answer = subprocess.run(
            [path, "-c", _ASK], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = answer.stdout.split()
    if answer.returncode != 0 or len(words) != 4:
        return None
    major, minor, makes, headers = (int(word) for word in words)
    return Interpreter(path, (major, minor), bool(makes), bool(headers))


def _check_platform() -> Finding:
    system, machine = platform.system(), platform.machine()
    found = f"{system} {machine}"
    if system != "Linux":
        return Finding("platform", found, "Use Linux on x86-64 (a container or WSL 2 will do).")
    libc, version = platform.libc_ver()
    if libc != "glibc" or _numbers(version) < _TESTED_GLIBC:
        return Finding(
            "platform",
            f"{found}, {libc or 'no glibc'} {version}".strip(),
            "Use a distribution with glibc 2.28 or newer (Debian 10, Ubuntu 20.04, RHEL 8): "
            "the engines' wheels need it.",
        )
    if machine != "x86_64":
        return Finding(
            "platform",
            found,
            "Not tested here: only x86-64 is. Expect missing wheels.",
            fatal=False,
        )
    return Finding("platform", f"{found}, glibc {version}")


def _check_cpu() -> Finding:
    if platform.machine() != "x86_64":
        return Finding("CPU", platform.machine())
    flags = _cpu_flags()
    if "avx512f" in flags:
        return Finding("CPU", f"AVX-512, {os.cpu_count()} cores")
    if "avx2" in flags:
        return Finding("CPU", f"AVX2, {os.cpu_count()} cores")
    return Finding("CPU", "no AVX2", "vLLM needs a CPU with AVX2 (Intel or AMD since about 2015).")


def _check_python(interpreter: Interpreter | None) -> Finding:
    wanted = f"Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if interpreter is None:
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return Finding(
            "Python",
            f"{here} at {sys.executable}",
            f"{wanted} is needed. Debian, Ubuntu: apt-get install python3.11 python3.11-venv "
            "python3.11-dev (or 3.12, 3.13); else pyenv or conda.",
        )
    name = f"python{interpreter.version[0]}.{interpreter.version[1]}"
    found = f"{interpreter.version[0]}.{interpreter.version[1]} at {interpreter.path}"
    if not interpreter.makes_environments:
        return Finding("Python", f"{found}, without venv", f"apt-get install {name}-venv")
    if not interpreter.has_headers:
        return Finding("Python", f"{found}, without Python.h", f"apt-get install {name}-dev")
    return Finding("Python", found)


def _check_compiler() -> Finding:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler:
        return Finding("compiler", compiler)
    return Finding(
        "compiler", "no g++", "DeepSpeed compiles its communication op: apt-get install g++"
    )


def _check_memory() -> Finding:
    memory = _memory_bytes()
    found = f"{memory / _GIB:.1f} GiB"
    if memory >= _MIN_MEMORY_BYTES:
        return Finding("memory", found)
    return Finding(
        "memory", found, f"Two engines and the services need {_MIN_MEMORY_BYTES // _GIB} GiB."
    )


def _check_disk(root: Path) -> Finding:
    free = shutil.disk_usage(root).free
    found = f"{free / _GIB:.0f} GiB free"
    if free >= _MIN_DISK_BYTES or (root / ".venv-engines").is_dir():
        return Finding("disk", found)
    return Finding(
        "disk", found, f"The two environments and a run need {_MIN_DISK_BYTES // _GIB} GiB here."
    )


def _check_root_tools() -> Finding:
    if os.geteuid() != 0:
        return Finding("user", "not root")
    if shutil.which("setpriv"):
        return Finding("user", "root; PostgreSQL will run as nobody")
    return Finding(
        "user", "root, without setpriv", "PostgreSQL refuses root: apt-get install util-linux"
    )


def _check_sandbox() -> Finding:
    """Asks for the tool only: whether namespaces are allowed is found when a sandbox is opened."""
    if shutil.which("bwrap"):
        return Finding("sandbox", "bubblewrap")
    return Finding(
        "sandbox",
        "no bwrap",
        "The reward `code` isolates programs with it: apt-get install bubblewrap",
        fatal=False,
    )


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def report(findings: list[Finding]) -> bool:
    """Prints what is wrong, or one line if nothing is; returns whether the setup can go on."""
    out = sys.stdout
    if not any(finding.remedy for finding in findings):
        out.write("machine: " + "; ".join(f"{f.what} {f.found}" for f in findings) + "\n")
        return True
    for finding in findings:
        mark = "ok  " if finding.remedy is None else ("MISS" if finding.fatal else "note")
        out.write(f"  {mark}  {finding.what}: {finding.found}\n")
        if finding.remedy:
            out.write(f"        -> {finding.remedy}\n")
    return not any(finding.remedy and finding.fatal for finding in findings)


def main() -> None:
    """Checks this machine; exits with 1 if something is missing."""
    if not report(check(Path(__file__).resolve().parent.parent)):
        sys.stderr.write("error: this machine lacks what is marked MISS; nothing was downloaded\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
