"""Opens the place where programs of a model run, and refuses where they cannot be contained."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Protocol

import psutil

from rewards.contract import Program, ProgramResult, Sandbox, SandboxLimits
from tasks.reward.bubblewrap import GET_IT, BubblewrapSandbox
from tasks.reward.contract import SandboxConfig
from tasks.reward.gate import as_bytes, gated, inside, spawn
from tasks.reward.http_sandbox import HttpSandbox
from tasks.reward.supervise import ProcessUse, read_use, watch

logger = logging.getLogger(__name__)

_PROBE = Program({"probe.py": "print(6 * 7)"}, ("python", "-S", "probe.py"))


class OpenSandbox(Sandbox, Protocol):
    """A sandbox that somebody has to close."""

    def close(self) -> None:
        """Lets go of what it holds; safe to call twice."""
        ...


def open_sandbox(config: SandboxConfig, *, scratch: Path) -> OpenSandbox:
    """Opens the backend that `config` names, and proves that it works by running a program in it.

    A service is asked first when it is needed: it may be away now and back then.

    Args:
        config: which backend, and how many programs at once.
        scratch: folders of unsandboxed programs lie there while they run.

    Raises:
        ValueError: programs cannot be isolated here; the message says why and how to get there.
    """
    if config.backend == "http":
        return HttpSandbox(config)
    if config.allow_unsandboxed:
        logger.warning(
            "reward.sandbox.allow_unsandboxed=true: PROGRAMS THAT A MODEL WROTE RUN AS THIS USER, "
            "WITH ITS FILES, ITS CREDENTIALS AND ITS NETWORK. THEY CAN READ THE TESTS AND FORGE "
            "REWARDS. Use it only for code that you would run yourself."
        )
        return UnsandboxedSandbox(scratch=scratch)
    return _isolated(config)


class UnsandboxedSandbox:
    """Runs programs as plain processes of this user: limits hold, walls do not exist.

    CPU seconds, memory, output and wall time are limited as in a sandbox; the number of processes
    and the size of the folder are not. A process that hides from its parents may survive.
    """

    joins = False

    def __init__(self, *, scratch: Path) -> None:
        """Keeps `scratch`; nothing is made there before a program runs."""
        self._scratch = scratch

    def close(self) -> None:
        """Holds nothing between programs."""

    def run(self, program: Program, *, limits: SandboxLimits) -> ProgramResult:
        """Returns how `program` ended; see `rewards.contract.Sandbox`."""
        with tempfile.TemporaryDirectory(dir=self._scratch, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            for file, content in program.files.items():
                path = folder / inside(file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(as_bytes(content))
            first, *rest = program.command
            command = [os.path.realpath(sys.executable) if first == "python" else first, *rest]
            argv = gated(command, limits, processes=None, folder=str(folder))
            confined = spawn(argv, stdin=program.stdin, files=(), joined=None, processes=_Tree)
            return watch([confined], limits)[0]

    def run_joined(
        self, program: Program, *, checker: Program, limits: SandboxLimits
    ) -> tuple[ProgramResult, ProgramResult]:
        """Refuses: a program could read its checker's memory, and write the verdict itself.

        Raises:
            OSError: always.
        """
        raise OSError(
            "Unsandboxed programs cannot be joined: one could rewrite the other. Expected a "
            "backend that isolates: reward.sandbox.allow_unsandboxed=false with bubblewrap."
        )


def _isolated(config: SandboxConfig) -> BubblewrapSandbox:
    try:
        if sys.platform != "linux":
            raise OSError(f"bubblewrap needs Linux, this is {sys.platform}")
        sandbox = BubblewrapSandbox(slots=config.concurrency)
    except OSError as error:
        raise ValueError(_refusal(str(error))) from error
    try:
        result = sandbox.run(_PROBE, limits=SandboxLimits())
        if result.stdout != "42\n":
            raise OSError(f"a first program ended as {result}")
    except OSError as error:
        sandbox.close()
        raise ValueError(_refusal(str(error))) from error
    return sandbox


def _refusal(cause: str) -> str:
    return (
        f"Programs of the model cannot be isolated on this machine: {cause}. Expected bubblewrap "
        f"and user namespaces; no program was graded. {GET_IT}"
    )


class _Tree:
    """The processes below one that was started without walls."""

    def __init__(self, pid: int, info: int) -> None:
        os.close(info)
        self._pid = pid

    def opened(self) -> None:
        """Needs nothing: the tree is looked up anew each time."""

    def uses(self) -> dict[int, ProcessUse]:
        uses: dict[int, ProcessUse] = {}
        for pid in self._pids():
            with contextlib.suppress(OSError):  # It may have ended since it was listed.
                stat = Path(f"/proc/{pid}/stat").read_bytes()
                uses[pid] = read_use(stat, lambda: ())
        return uses

    def shared_bytes(self) -> int:
        total = 0
        for pid in self._pids():
            with contextlib.suppress(psutil.Error):
                total += psutil.Process(pid).memory_full_info().pss
        return total

    def kernel_bytes(self) -> int:
        return 0

    def kill(self) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Holds nothing."""

    def _pids(self) -> list[int]:
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(self._pid).children(recursive=True)
            return [self._pid, *(process.pid for process in below)]
        return []
