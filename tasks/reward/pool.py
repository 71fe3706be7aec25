"""Grading processes that stay warm and can be killed: the engine of the reward stage.

A worker that overruns or dies costs the sample that it was at and is replaced at once; what waits
behind a slow sample is taken over by workers that have nothing to do. Nothing here knows the
store or what a reward means.
"""

import json
import os
import pickle
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rewards.contract import RewardInput, Score, Status
from tasks.errors import Permanent, Transient
from tasks.processes import kill_group
from tasks.reward.contract import RewardConfig
from tasks.reward.nursery import Nursery, NurseryGone
from tasks.reward.process_clock import ProcessClock
from tasks.reward.worker import OUT_OF_MEMORY_EXIT, Batch, JobSpec, PartSpec
from tasks.workspace import Workspace

_PREFETCH = 16
"""Most samples that a worker holds: enough for cheap messages, few enough to spread the work."""
_SLOW_S = 0.1
"""What waits behind a sample for so long is handed to a worker that has nothing to do."""
_START_LIMIT_S = 120.0
_MAX_FAILED_STARTS = 3
_POLL_S = 1.0
_PROGRESS_S = 0.5
_ABSOLUTE_WALL_FACTOR = 20
"""A sample that neither computes nor waits (its process was stopped) is given up after so many
wall limits."""
# Nothing that a scoring function has no use for: no credentials of the store or of services.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")
# Sets of symbols are ordered by hash: without a fixed one, two workers could differ. Libraries
# start no threads of their own: what forks must have none, and CPU seconds are counted.
_FIXED_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

Mode = Literal["score", "check_gold"]


@dataclass(eq=False)
class _Job:
    """One call of `grade`: what is asked, what is open, what is known."""

    items: Sequence[RewardInput]
    config: RewardConfig
    spec: JobSpec
    todo: deque[int]
    results: dict[int, tuple[Score, ...]] = field(default_factory=dict[int, tuple[Score, ...]])
    died_at: set[int] = field(default_factory=set[int])

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.items)


@dataclass(eq=False)
class _Worker:
    """One process and the samples that it has not answered yet, each with its call."""

    requests: int
    results: int
    pid: int | None = None
    ready: bool = False
    retiring: bool = False
    num_graded: int = 0
    knows: JobSpec | None = None
    pending: deque[tuple[_Job, int]] = field(default_factory=deque[tuple[_Job, int]])
    taken_over: bool = False
    since: float = field(default_factory=time.monotonic)
    clock: ProcessClock | None = None
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytes = b""
    overran: Literal["wall", "cpu"] | None = None


class RewardPool:
    """Worker processes that grade samples; use from any thread, one call at a time.

    The workers start in the background: construction returns at once. They end with this process,
    however it ends.
    """

    def __init__(self, kinds: Iterable[str], *, workers: int, log_dir: Path) -> None:
        """Starts the workers; they load the scoring functions `kinds` meanwhile."""
        self._kinds = tuple(sorted(set(kinds)))
        self._log = log_dir / "reward-workers.log"
        self._num_workers = workers
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._workers: list[_Worker] = []
        self._open_nursery()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def grade(
        self,
        items: Sequence[RewardInput],
        *,
        config: RewardConfig,
        mode: Mode = "score",
        progress: Callable[[int], None] | None = None,
    ) -> list[tuple[Score, ...]]:
        """Returns the scores of every item, in the order of `items`, one per part of `config`.

        `progress` is told now and then, on this thread, how many items are finished, and all at
        the end.

        Whatever an item does, the others are graded: an item over its CPU seconds (or over the
        wall backstop) is `grader_timeout`, one that kills its worker twice or raises is
        `grader_error`. The limits are counted in CPU seconds of the worker, and the backstop in
        seconds in which the worker waits instead of computing, so that a busy machine changes no
        result.

        Raises:
            Transient: workers do not start; the message ends with their log.
            Permanent: the pool was closed.
        """
        with self._lock:
            job = _new_job(items, config, mode)
            try:
                self._finish(job, progress or _unheard)
            finally:
                if not job.done:
                    self._drop_unfinished()
            return [job.results[index] for index in range(len(items))]

    def close(self) -> None:
        """Ends all workers and what they started, and a call that goes on; safe to call twice."""
        self._closing.set()
        with self._lock:
            if not self._workers:
                return
            for worker in list(self._workers):
                if self._nursery.is_ready:
                    self._end(worker)
                else:  # It exists not yet, or ends when its pipe is closed.
                    self._forget(worker)
            self._workers.clear()
            self._selector.unregister(self._nursery)
            self._nursery.kill()
            self._selector.close()

    def pids(self) -> list[int]:
        """Returns the process ids of the workers, each of which leads its own process group.

        Waits until they are started.
        """
        with self._lock:
            while not self._learn_pids():
                self._selector.select(timeout=_POLL_S)
                self._read_nursery()
            return [worker.pid for worker in self._workers if worker.pid is not None]

    def _finish(self, job: _Job, progress: Callable[[int], None]) -> None:
        told = time.monotonic()
        while not job.done:
            if self._closing.is_set():
                raise Permanent("The graders were closed while samples were graded.")
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                progress(len(job.results))
            self._hand_out(job)
            for key, _ in self._selector.select(timeout=self._poll_s()):
                if key.data is None:
                    self._read_nursery()
                elif key.data not in self._workers:  # Ended a moment ago.
                    continue
                elif key.fd == key.data.requests:
                    self._send(key.data)
                else:
                    self._read(key.data)
            self._check_clocks()
        progress(len(job.results))

    def _poll_s(self) -> float:
        """Looks again soon while something waits behind a sample and a worker is idle."""
        idle = any(worker.ready and not worker.pending for worker in self._workers)
        behind = any(len(worker.pending) > 1 for worker in self._workers)
        return _SLOW_S if idle and behind else _POLL_S

    def _drop_unfinished(self) -> None:
        """After an error: workers that still grade what nobody waits for are replaced."""
        for worker in list(self._workers):
            if worker.pending:
                self._end(worker)
                self._spawn()

    def _open_nursery(self) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment.update(_FIXED_ENVIRONMENT)
        self._nursery = Nursery(self._kinds, log=self._log, environment=environment)
        self._nursery_since = time.monotonic()
        self._selector.register(self._nursery, selectors.EVENT_READ, None)
        for _ in range(self._num_workers):
            self._spawn()

    def _spawn(self) -> None:
        their_requests, requests = os.pipe()
        results, their_results = os.pipe()
        os.set_blocking(requests, False)
        worker = _Worker(requests, results)
        self._workers.append(worker)
        self._selector.register(results, selectors.EVENT_READ, worker)
        with self._log.open("ab") as log:
            try:
                self._nursery.ask_for_worker(their_requests, their_results, log.fileno())
            except NurseryGone:  # Its socket tells `_read_nursery`, which starts another.
                pass
            finally:
                os.close(their_requests)
                os.close(their_results)

    def _read_nursery(self) -> None:
        # Its replies may have been taken since it was seen to have some.
        try:
            self._nursery.read_waiting()
        except NurseryGone:
            self._replace_nursery()
        self._learn_pids()

    def _learn_pids(self) -> bool:
        """Gives workers the process ids that the nursery told; returns whether all have theirs."""
        for worker in self._workers:
            if worker.pid is None and (pid := self._nursery.next_pid()) is not None:
                worker.pid, worker.clock = pid, ProcessClock(pid)
        return all(worker.pid is not None for worker in self._workers)

    def _replace_nursery(self) -> None:
        """Starts all anew; what the workers were at is given to others, and nobody is blamed."""
        self._selector.unregister(self._nursery)
        code = self._nursery.kill()
        for worker in list(self._workers):
            self._workers.remove(worker)
            self._forget(worker)  # It ends when it sees its pipe closed.
            self._give_back(worker)
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self._failed_starts = 0
            self._open_nursery()
            raise Transient(_start_failure(self._log, code))
        self._open_nursery()

    def _hand_out(self, job: _Job) -> None:
        if not job.todo:
            self._take_over(job)
        for worker in list(self._workers):
            room = _PREFETCH - len(worker.pending)
            if not worker.ready or worker.retiring or room < _PREFETCH // 2:
                continue
            share = max(1, -(-len(job.todo) // (2 * len(self._workers))))
            indices = _take(job, min(room, share))
            if not indices:
                return
            if not worker.pending:
                _restart_clocks(worker)
            worker.pending.extend((job, index) for index in indices)
            batch = Batch(
                None if worker.knows is job.spec else job.spec,
                tuple(job.items[index] for index in indices),
            )
            worker.knows = job.spec
            worker.unsent += pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
            self._send(worker)

    def _take_over(self, job: _Job) -> None:
        """Lets idle workers grade what waits behind a slow sample; the first result counts."""
        now = time.monotonic()
        if not any(worker.ready and not worker.pending for worker in self._workers):
            return
        for worker in self._workers:
            slow = len(worker.pending) > 1 and now - worker.since > _SLOW_S
            if slow and not worker.taken_over:
                worker.taken_over = True
                behind = list(worker.pending)[1:]
                job.todo.extend(
                    index for asked, index in behind if asked is job and index not in job.results
                )

    def _read(self, worker: _Worker) -> None:
        chunk = os.read(worker.results, 1 << 20)
        *lines, worker.unread = (worker.unread + chunk).split(b"\n")
        for line in lines:
            message: Any = json.loads(line)
            _restart_clocks(worker)
            if message == "ready":
                worker.ready = True
                self._failed_starts = 0
                continue
            job, index = worker.pending.popleft()
            job.results.setdefault(index, tuple(Score(*score) for score in message))
            worker.num_graded += 1
            if worker.num_graded >= job.config.recycle_after and not worker.retiring:
                worker.retiring = True
                self._spawn()
        if not chunk:
            self._replace(worker)
        elif worker.retiring and not worker.pending:
            self._end(worker)

    def _replace(self, worker: _Worker) -> None:
        """Takes a dead worker's sample and what waited from it, and starts another in its place."""
        code = self._end(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise Transient(_start_failure(self._log, code))
        elif worker.pending and code != OUT_OF_MEMORY_EXIT:
            _blame(worker, code)
        self._give_back(worker)
        if not worker.retiring:
            self._spawn()

    def _check_clocks(self) -> None:
        now = time.monotonic()
        if not self._nursery.is_ready and now - self._nursery_since > _START_LIMIT_S:
            self._replace_nursery()
            return
        for worker in self._workers:
            if worker.clock is None or worker.pid is None or not worker.pending:
                continue
            if now - worker.since < _SLOW_S:
                continue
            config = worker.pending[0][0].config
            waited_s, cpu_s = worker.clock.read(now)
            stopped = now - worker.since > _ABSOLUTE_WALL_FACTOR * config.wall_limit_s
            if waited_s > config.wall_limit_s or stopped:
                worker.overran = "wall"
            elif cpu_s > 2 * config.cpu_limit_s + 1.0:  # It caught or blocked the kernel's signal.
                worker.overran = "cpu"
            if worker.overran or worker.clock.is_dead:
                kill_group(worker.pid)  # Its pipe closes, and `_read` sees that.

    def _end(self, worker: _Worker) -> int:
        """Kills a worker and what it started, and returns how it had ended before."""
        code = -signal.SIGKILL
        try:
            while not self._learn_pids():
                self._nursery.read()
            assert worker.pid is not None, "all have theirs"
            code = self._nursery.end_worker(worker.pid)
        except NurseryGone:  # Its socket tells `_read_nursery` too.
            pass
        self._forget(worker)
        self._workers.remove(worker)
        return code

    def _give_back(self, worker: _Worker) -> None:
        """Puts what a dead worker had not answered before all else that is to be graded."""
        held = {asked for other in self._workers for asked in other.pending}
        for job, index in reversed(worker.pending):
            if index not in job.results and index not in job.todo and (job, index) not in held:
                job.todo.appendleft(index)
        worker.pending.clear()

    def _send(self, worker: _Worker) -> None:
        """Writes what the pipe takes; a worker that computes in C reads nothing."""
        try:
            while worker.unsent:
                written = os.write(worker.requests, worker.unsent[: 1 << 16])
                del worker.unsent[:written]
        except BlockingIOError:
            if worker.requests not in self._selector.get_map():
                self._selector.register(worker.requests, selectors.EVENT_WRITE, worker)
            return
        except BrokenPipeError:  # It died: its other pipe tells `_read`.
            worker.unsent.clear()
        if worker.requests in self._selector.get_map():
            self._selector.unregister(worker.requests)

    def _forget(self, worker: _Worker) -> None:
        if worker.requests in self._selector.get_map():
            self._selector.unregister(worker.requests)
        self._selector.unregister(worker.results)
        os.close(worker.results)
        os.close(worker.requests)


def start(config: dict[str, Any], *, model_dir: Path, workspace: Workspace) -> RewardPool:
    """Starts the pool for a RewardConfig (as plain values) and returns at once.

    Args:
        config: the fields of a RewardConfig.
        model_dir: unused; the parameter keeps the door alike in every room.
        workspace: the workers' logs go to its scratch.
    """
    parsed = RewardConfig.model_validate(config)
    kinds = [part.kind for part in parsed.parts]
    return RewardPool(kinds, workers=parsed.workers, log_dir=workspace.scratch)


def _unheard(finished: int) -> None:
    """For callers without a progress bar."""


def _new_job(items: Sequence[RewardInput], config: RewardConfig, mode: Mode) -> _Job:
    parts = tuple(PartSpec(part.stored_name, part.kind, part.options) for part in config.parts)
    spec = JobSpec(mode, parts, config.cpu_limit_s, config.memory_limit_bytes)
    return _Job(items, config, spec, deque(range(len(items))))


def _take(job: _Job, count: int) -> list[int]:
    """Takes up to `count` samples that have no result yet."""
    taken: list[int] = []
    while job.todo and len(taken) < count:
        index = job.todo.popleft()
        if index not in job.results:
            taken.append(index)
    return taken


def _restart_clocks(worker: _Worker) -> None:
    worker.since = time.monotonic()
    worker.taken_over = False
    if worker.clock is not None:
        worker.clock.restart()


def _blame(worker: _Worker, code: int) -> None:
    """Gives the sample that the worker died at its status; an unexplained death gets one retry."""
    job, index = worker.pending[0]
    config = job.config
    if worker.overran == "wall":
        status, reason = "grader_timeout", f"took more than {config.wall_limit_s:g} s of wall time"
    elif worker.overran == "cpu" or code == -signal.SIGPROF:
        status, reason = "grader_timeout", f"took more than {config.cpu_limit_s:g} CPU seconds"
    elif index not in job.died_at:
        job.died_at.add(index)
        return
    else:
        sample = job.items[index].sample_id
        names = ", ".join(part.name for part in job.spec.parts)
        status = "grader_error"
        reason = f"the worker died ({_ending(code)}) in reward {names} on sample {sample!r}"
    worker.pending.popleft()
    job.results.setdefault(index, _all_parts(job, status, reason))


def _all_parts(job: _Job, status: Status, reason: str) -> tuple[Score, ...]:
    return tuple(Score(None, status, reason) for _ in job.spec.parts)


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _start_failure(log: Path, code: int) -> str:
    tail = log.read_text(errors="replace")[-2000:]
    return (
        f"{_MAX_FAILED_STARTS} grading processes in a row ended before they were ready "
        f"({_ending(code)}). Expected them to load their rewards; their log "
        f"{log} ends with:\n{tail}"
    )
