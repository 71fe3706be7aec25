"""Watches programs that run in a sandbox: reads their output, counts what they use, ends them.

How a program is isolated is the backend's; here are only its pipes, its clock and its end.
"""

import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rewards.contract import KilledBy, ProgramResult, SandboxLimits

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_POLL_S = 0.05
# A round that came late says little of what happened since: it is charged as a short one.
_MAX_CHARGED_S = 2 * _POLL_S
_BLOCKED_SHARE = 0.1
"""Of a second that counts as sleep where nobody wants a processor, but one waits for a disk or for
us to read: an honest program does so briefly, and one that never ends must not reach the wall."""
_CHUNK_BYTES = 1 << 16
_GRACE_S = 1.0
_START_LIMIT_S = 60.0
_SIGNAL_EXIT = 128


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process has used so far; `children_cpu_s` is that of the children it waited for."""

    cpu_s: float
    children_cpu_s: float
    resident_bytes: int
    wants_cpu: bool
    """One of its threads runs or waits for a processor: it does not sleep."""
    blocked: bool
    """One of its threads waits for a disk, or in the kernel for something else."""


class Processes(Protocol):
    """The processes of one sandbox."""

    def opened(self) -> None:
        """Is called once, when all limits are in force."""
        ...

    def uses(self) -> Mapping[int, ProcessUse]:
        """Returns what the living ones have used, by process id."""
        ...

    def shared_bytes(self) -> int:
        """Returns their memory with shared pages counted once: exact and slow."""
        ...

    def kernel_bytes(self) -> int:
        """Returns what the kernel holds for their files beside the contents."""
        ...

    def kill(self) -> None:
        """Ends every one of them; safe to call twice."""
        ...

    def close(self) -> None:
        """Waits until the last one is gone, and lets go of what was opened to watch them."""
        ...


@dataclass
class Confined:
    """A program that was started and waits behind its gate, and the grader's ends of its pipes.

    `started` yields a byte when all limits are in force; the program begins when `go` gets a line,
    and never if `go` is closed before: a grader that dies in between leaves nothing behind.
    """

    pid: int
    stdout: int
    stderr: int
    started: int
    go: int
    processes: Processes


@dataclass
class _Watched:
    confined: Confined
    pidfd: int
    output: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    begun: bool = False
    status: int | None = None
    cpu_s: float = 0.0
    seen_cpu_s: dict[int, float] = field(default_factory=dict[int, float])
    uses: Mapping[int, ProcessUse] = field(default_factory=dict[int, ProcessUse])
    killed_by: KilledBy | None = None

    def kill(self, reason: KilledBy) -> None:
        if self.status is None:
            self.killed_by = self.killed_by or reason
            self.confined.processes.kill()


def watch(
    programs: Sequence[Confined],
    limits: SandboxLimits,
    *,
    until: Literal["all", "last"] = "all",
) -> list[ProgramResult]:
    """Lets the programs begin and returns how they ended; afterwards nothing of them is left.

    A program is ended when its processes together exceed CPU seconds, memory or output, when all
    programs have slept for `asleep_s` in total, or at the wall backstop. A busy machine makes no
    program sleep: who waits for a processor is not asleep. Who has slept for most of the time until
    the backstop was not kept from running, and is ended for that.

    Args:
        programs: behind their gates; their descriptors are closed here.
        limits: of each program; sleep and wall time are those of all together.
        until: `last`: the end of the last program ends the others.

    Raises:
        OSError: a program did not reach its gate; the message ends with its standard error.
    """
    watched = [_Watched(each, os.pidfd_open(each.pid)) for each in programs]
    try:
        with selectors.DefaultSelector() as selector:
            _Watch(watched, limits, selector, until=until).run()
        return [_result(each, limits) for each in watched]
    finally:
        for each in watched:
            _finish(each)


class _Watch:
    """One call of `watch`: its selector and its clocks."""

    def __init__(
        self,
        watched: Sequence[_Watched],
        limits: SandboxLimits,
        selector: selectors.BaseSelector,
        *,
        until: Literal["all", "last"],
    ) -> None:
        self._watched = watched
        self._limits = limits
        self._selector = selector
        self._until = until
        self._asleep_s = 0.0
        self._idle_s = 0.0
        self._measuring_s = 0.0
        self._moved = False
        self._killing = math.inf
        for each in watched:
            for fd in (each.confined.stdout, each.confined.stderr):
                each.output[fd] = bytearray()
                selector.register(fd, selectors.EVENT_READ, (each, self._read))
            selector.register(each.pidfd, selectors.EVENT_READ, (each, self._reap))
            selector.register(each.confined.started, selectors.EVENT_READ, (each, self._begin))

    def run(self) -> None:
        began = looked = time.monotonic()
        while self._selector.get_map():
            ready = self._selector.select(timeout=_POLL_S)
            if not ready and all(each.status is not None for each in self._watched):
                return  # A process that is not ours to wait for still holds a pipe.
            for key, _ in ready:
                # An end that was seen in this round may have closed what comes after it.
                if key.fd in self._selector.get_map():
                    each, act = key.data
                    act(each, key.fd)
            now = time.monotonic()
            if now - looked >= _POLL_S:
                self._look(now - looked, now - began)
                looked = now

    def _read(self, each: _Watched, fd: int) -> None:
        chunk = os.read(fd, _CHUNK_BYTES)
        self._moved = True
        output = each.output[fd]
        if not chunk:
            self._selector.unregister(fd)
            return
        output += chunk
        if len(output) > self._limits.output_bytes:
            del output[self._limits.output_bytes :]
            each.kill("output")
            each.killed_by = "output"
            self._selector.unregister(fd)

    def _begin(self, each: _Watched, fd: int) -> None:
        """Opens all gates when the last program has reached its own."""
        each.begun = bool(os.read(fd, 1))
        self._selector.unregister(fd)
        if each.begun:
            each.confined.processes.opened()
        if all(each.begun for each in self._watched):
            for other in self._watched:
                os.write(other.confined.go, b"\n")
        elif not each.begun:
            self._kill_others(each)

    def _reap(self, each: _Watched, fd: int) -> None:
        self._selector.unregister(fd)
        _, status, usage = os.wait4(each.confined.pid, 0)
        each.status = status
        each.confined.processes.kill()  # What outlived it, if anything did.
        each.cpu_s = max(each.cpu_s, usage.ru_utime + usage.ru_stime)
        if self._until == "last" and each is self._watched[-1]:
            # Who sees that the last one has hung up ends by itself, and tells why it ended.
            self._killing = time.monotonic() + _GRACE_S

    def _kill_others(self, each: _Watched) -> None:
        for other in self._watched:
            if other is not each:
                other.kill("signal")

    def _look(self, elapsed_s: float, wall_s: float) -> None:
        """Counts what the programs used, and ends those that are over their limits."""
        living = [each for each in self._watched if each.status is None]
        if not all(each.begun for each in self._watched):
            if wall_s > _START_LIMIT_S:
                for each in living:
                    each.confined.processes.kill()
            return
        if time.monotonic() > self._killing:
            for each in living:
                each.kill("signal")
        # The last look is why this one is late, if it took long: no program shall gain by that.
        known_s = min(elapsed_s, _MAX_CHARGED_S + self._measuring_s)
        self._measuring_s = 0.0
        worked_s = sum(self._count(each) for each in living)
        self._charge_sleep(known_s - worked_s, living)
        if self._asleep_s > self._limits.asleep_s or wall_s > self._limits.wall_s:
            asleep = self._asleep_s > self._limits.asleep_s or self._idle_s > wall_s / 2
            for each in living:
                each.kill("asleep" if asleep else "wall")

    def _charge_sleep(self, idle_s: float, living: Sequence[_Watched]) -> None:
        """Charges time in which the programs did not work, if they did not want to."""
        moved, self._moved = self._moved, False
        uses = [use for each in living for use in each.uses.values()]
        if idle_s <= 0 or any(use.wants_cpu for use in uses):
            return
        self._idle_s += idle_s
        blocked = moved or any(use.blocked for use in uses)
        self._asleep_s += idle_s * (_BLOCKED_SHARE if blocked else 1.0)

    def _count(self, each: _Watched) -> float:
        """Returns the CPU seconds of a program since the last look."""
        uses = each.uses = each.confined.processes.uses()
        before = each.cpu_s
        each.seen_cpu_s |= {pid: use.cpu_s for pid, use in uses.items()}
        # Children that nobody waits for are in no parent's sum; those too short to be seen are.
        waited_for = sum(use.cpu_s + use.children_cpu_s for use in uses.values())
        each.cpu_s = max(before, waited_for, sum(each.seen_cpu_s.values()))
        if each.cpu_s > self._limits.cpu_s:
            each.kill("cpu")
        resident = sum(use.resident_bytes for use in uses.values())
        limit = self._limits.memory_bytes - each.confined.processes.kernel_bytes()
        began = time.monotonic()
        over = resident > limit and each.confined.processes.shared_bytes() > limit
        self._measuring_s += time.monotonic() - began
        if over or limit < 0:
            each.kill("memory")
        return each.cpu_s - before


def discard(confined: Confined) -> None:
    """Ends and reaps a program that nobody watches, and closes its descriptors."""
    confined.processes.kill()
    os.waitpid(confined.pid, 0)
    _close(confined)


def _close(confined: Confined) -> None:
    confined.processes.close()
    for fd in (confined.stdout, confined.stderr, confined.started, confined.go):
        os.close(fd)


def _finish(each: _Watched) -> None:
    os.close(each.pidfd)
    if each.status is None:
        discard(each.confined)
    else:
        _close(each.confined)


def _result(each: _Watched, limits: SandboxLimits) -> ProgramResult:
    stdout, stderr = (bytes(output).decode("utf-8", "replace") for output in each.output.values())
    assert each.status is not None
    code = os.waitstatus_to_exitcode(each.status)
    if not each.begun:
        raise OSError(
            f"A sandboxed program did not start (exit status {code}). Expected the sandbox to be "
            f"set up as when it was opened; it said: {stderr.strip()[-1000:] or 'nothing'}"
        )
    killed_by = each.killed_by
    if killed_by is None and each.cpu_s > limits.cpu_s:
        killed_by = "cpu"
    if killed_by is None:
        killed_by = signalled(code)
    return ProgramResult(None if killed_by else code, stdout, stderr, killed_by)


def signalled(code: int) -> KilledBy | None:
    """Returns what an exit status says of a signal: negative, or 128 + its number from a shell."""
    number = -code if code < 0 else code - _SIGNAL_EXIT
    if number in (signal.SIGXCPU, signal.SIGPROF):
        return "cpu"
    return "signal" if number in {each.value for each in signal.Signals} else None


def read_use(stat: bytes, task_states: Callable[[], Sequence[bytes]]) -> ProcessUse:
    """Returns what a line of `/proc/<pid>/stat` says; a zombie uses nothing but its CPU seconds.

    Args:
        stat: the line.
        task_states: the states of all its threads, asked only where the first one sleeps.
    """
    fields = stat[stat.rindex(b")") + 2 :].split()
    state, threads = fields[0], int(fields[17])
    states = [state, *(task_states() if threads > 1 and state != b"R" else ())]
    return ProcessUse(
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        children_cpu_s=(int(fields[13]) + int(fields[14])) / _TICKS,
        resident_bytes=int(fields[21]) * _PAGE_BYTES,
        wants_cpu=b"R" in states,
        blocked=b"D" in states,
    )
