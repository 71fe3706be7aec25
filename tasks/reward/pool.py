"""Grading processes that stay warm and can be killed: the engine of the reward stage.

A worker that overruns or dies costs the sample that it was at, is replaced, and the rest of its
batch is graded by others. Nothing here knows the store or what a reward means.
"""

import json
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from rewards.contract import RewardInput, Score, Status
from tasks.errors import Transient
from tasks.processes import kill_group
from tasks.reward.contract import RewardConfig
from tasks.reward.worker import OUT_OF_MEMORY_EXIT, Batch, PartSpec
from tasks.workspace import Workspace

_BATCH_ITEMS = 32
"""Most samples per message: enough to make the message cheap, few enough to spread the work."""
_START_LIMIT_S = 120.0
_MAX_FAILED_STARTS = 3
_POLL_S = 1.0
_PROGRESS_S = 0.5
# Nothing that a scoring function has no use for: no credentials of the store or of services.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")

Mode = Literal["score", "check_gold"]


@dataclass
class _Worker:
    """One process, the items that it has not answered yet, and since when it works on the first."""

    process: "subprocess.Popen[bytes]"
    log: Path
    ready: bool = False
    pending: deque[int] = field(default_factory=deque[int])
    since: float = field(default_factory=time.monotonic)
    unread: bytes = b""
    overran_wall: bool = False

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout


@dataclass
class _Job:
    """One call of `grade`: what is asked, what is open, what is known."""

    items: Sequence[RewardInput]
    config: RewardConfig
    mode: Mode
    parts: tuple[PartSpec, ...]
    todo: deque[list[int]]
    results: dict[int, tuple[Score, ...]] = field(default_factory=dict[int, tuple[Score, ...]])
    died_at: set[int] = field(default_factory=set[int])

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.items)


class RewardPool:
    """Worker processes that grade samples; use from any thread, one call at a time.

    The workers start in the background: construction returns at once. They end with this process,
    however it ends.
    """

    def __init__(self, kinds: Iterable[str], *, workers: int, log_dir: Path) -> None:
        """Starts the workers; they load the scoring functions `kinds` meanwhile."""
        self._kinds = tuple(sorted(set(kinds)))
        self._log_dir = log_dir
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._workers: list[_Worker] = []
        for index in range(workers):
            self._workers.append(self._spawn(log_dir / f"reward-worker-{index}.log"))

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
        `grader_error`. The limits are counted in CPU seconds of the worker, so that a busy machine
        changes no result.

        Raises:
            Transient: workers do not start; the message ends with their log.
        """
        with self._lock:
            job = _new_job(items, config, mode, workers=len(self._workers))
            try:
                self._finish(job, progress or _unheard)
            finally:
                self._drop_unfinished()
            return [job.results[index] for index in range(len(items))]

    def _finish(self, job: _Job, progress: Callable[[int], None]) -> None:
        told = time.monotonic()
        while not job.done:
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                progress(len(job.results))
            self._hand_out(job)
            for key, _ in self._selector.select(timeout=_POLL_S):
                self._read(key.data, job)
            self._check_clocks(job)
        progress(len(job.results))

    def _drop_unfinished(self) -> None:
        """After an error: workers that still grade what nobody waits for are replaced."""
        for index, worker in enumerate(self._workers):
            if worker.pending:
                self._end(worker)
                self._workers[index] = self._spawn(worker.log)

    def close(self) -> None:
        """Ends all workers and what they started; safe to call twice."""
        with self._lock:
            for worker in self._workers:
                self._end(worker)
            self._workers.clear()
            self._selector.close()

    def pids(self) -> list[int]:
        """Returns the process ids of the workers, each of which leads its own process group."""
        return [worker.process.pid for worker in self._workers]

    def _spawn(self, log: Path) -> _Worker:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        # Sets of symbols are ordered by hash: without this, two workers could differ.
        environment["PYTHONHASHSEED"] = "0"
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "tasks.reward.worker", *self._kinds],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )
        worker = _Worker(process, log)
        self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
        return worker

    def _hand_out(self, job: _Job) -> None:
        for worker in self._workers:
            if not job.todo:
                return
            if worker.ready and not worker.pending:
                indices = job.todo.popleft()
                worker.pending.extend(indices)
                worker.since = time.monotonic()
                _send(worker, _batch(job, indices))

    def _read(self, worker: _Worker, job: _Job) -> None:
        chunk = os.read(worker.stdout.fileno(), 1 << 20)
        *lines, worker.unread = (worker.unread + chunk).split(b"\n")
        for line in lines:
            message: Any = json.loads(line)
            worker.since = time.monotonic()
            if message == "ready":
                worker.ready = True
                self._failed_starts = 0
            else:
                job.results[worker.pending.popleft()] = tuple(Score(*score) for score in message)
        if not chunk:
            self._replace(worker, job)

    def _replace(self, worker: _Worker, job: _Job) -> None:
        """Takes a dead worker's sample and batch from it, and starts another in its place."""
        self._end(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise Transient(_start_failure(worker))
        elif worker.pending and worker.process.returncode != OUT_OF_MEMORY_EXIT:
            _blame(worker, job)
        if worker.pending:
            job.todo.appendleft(list(worker.pending))
        self._workers[self._workers.index(worker)] = self._spawn(worker.log)

    def _check_clocks(self, job: _Job) -> None:
        now = time.monotonic()
        for worker in self._workers:
            limit = job.config.wall_limit_s if worker.ready else _START_LIMIT_S
            if (worker.pending or not worker.ready) and now - worker.since > limit:
                worker.overran_wall = True
                kill_group(worker.process.pid)  # Its pipe closes, and `_read` sees that.

    def _end(self, worker: _Worker) -> None:
        if worker.stdout.closed:
            return
        # Before the wait: as long as the leader is not reaped, its group id is nobody else's.
        kill_group(worker.process.pid)
        worker.process.wait()
        self._selector.unregister(worker.stdout)
        worker.stdout.close()
        _close_quietly(worker.stdin)


def _unheard(finished: int) -> None:
    """For callers without a progress bar."""


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


def _new_job(
    items: Sequence[RewardInput], config: RewardConfig, mode: Mode, *, workers: int
) -> _Job:
    size = max(1, min(_BATCH_ITEMS, math.ceil(len(items) / (2 * workers))))
    indices = range(len(items))
    todo = deque([list(indices[start : start + size]) for start in indices[::size]])
    parts = tuple(PartSpec(part.stored_name, part.kind, part.options) for part in config.parts)
    return _Job(items, config, mode, parts, todo)


def _batch(job: _Job, indices: Sequence[int]) -> Batch:
    return Batch(
        mode=job.mode,
        parts=job.parts,
        items=tuple(job.items[index] for index in indices),
        cpu_limit_s=job.config.cpu_limit_s,
        memory_limit_bytes=job.config.memory_limit_bytes,
    )


def _send(worker: _Worker, batch: Batch) -> None:
    payload = pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        worker.stdin.write(payload)
        worker.stdin.flush()
    except BrokenPipeError:  # It died while idle: its other pipe tells `_read`.
        return


def _blame(worker: _Worker, job: _Job) -> None:
    """Gives the sample that the worker died at its status; an unexplained death gets one retry."""
    index = worker.pending[0]
    code = worker.process.returncode
    if worker.overran_wall:
        limit = job.config.wall_limit_s
        status, reason = "grader_timeout", f"took more than {limit:g} s of wall time"
    elif code == -signal.SIGPROF:
        limit = job.config.cpu_limit_s
        status, reason = "grader_timeout", f"took more than {limit:g} CPU seconds"
    elif index not in job.died_at:
        job.died_at.add(index)
        worker.pending.popleft()
        job.todo.appendleft([index])
        return
    else:
        sample = job.items[index].sample_id
        names = ", ".join(part.name for part in job.parts)
        status = "grader_error"
        reason = f"the worker died ({_ending(code)}) in reward {names} on sample {sample!r}"
    worker.pending.popleft()
    job.results[index] = _all_parts(job, status, reason)


def _all_parts(job: _Job, status: Status, reason: str) -> tuple[Score, ...]:
    return tuple(Score(None, status, reason) for _ in job.parts)


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _start_failure(worker: _Worker) -> str:
    tail = worker.log.read_text(errors="replace")[-2000:]
    return (
        f"{_MAX_FAILED_STARTS} grading processes in a row ended before they were ready "
        f"({_ending(worker.process.returncode)}). Expected them to load their rewards; their log "
        f"{worker.log} ends with:\n{tail}"
    )


def _close_quietly(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # Bytes for a dead worker were still buffered.
        return
