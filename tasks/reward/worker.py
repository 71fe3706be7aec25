"""A grading process: scores one sample after the other and may be killed at any of them.

Started by `nursery.py` for `pool.py`; never imported by the stage. The kernel ends it when a
sample exceeds its CPU seconds (SIGPROF), whatever code runs: no Python is needed to stop C.

Between two samples the limit is armed anew, and environment, working directory, random numbers,
decimal context, locale and recursion limit are as at the start. Not covered: modules that a
scoring function patches, threads that it leaves running, files. Children that it leaves end with
the worker.
"""

import decimal
import json
import locale
import os
import pickle
import queue
import random
import resource
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, cast

from rewards import scorer
from rewards.contract import RewardInput, Score, Scorer
from tasks.reward.attribution import checked, failed

OUT_OF_MEMORY_EXIT = 70
"""Exit status after a sample that ran out of memory: its score was sent, the rest is not begun."""

_OUT_OF_MEMORY = "out of memory"
_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One scoring function with its options as plain values."""

    name: str
    kind: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobSpec:
    """How to score samples: every part in order, and what one sample may cost.

    Mode `check_gold` looks at the data set's side only: a score without value names a bad gold.
    """

    mode: Literal["score", "check_gold"]
    parts: tuple[PartSpec, ...]
    cpu_limit_s: float
    memory_limit_bytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples to score in order; `job` is None if it is that of the batch before."""

    job: JobSpec | None
    items: tuple[RewardInput, ...]


@dataclass(frozen=True)
class _Surroundings:
    """What a scoring function may have changed of its process, as it was at the start."""

    directory: str = field(default_factory=os.getcwd)
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    randomness: Any = field(default_factory=random.getstate)
    decimals: decimal.Context = field(default_factory=lambda: decimal.getcontext().copy())
    locale: str = field(default_factory=lambda: locale.setlocale(locale.LC_ALL))
    recursion_limit: int = field(default_factory=sys.getrecursionlimit)

    def restore(self) -> None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        if dict(os.environ) != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        os.chdir(self.directory)
        random.setstate(self.randomness)
        decimal.setcontext(self.decimals.copy())
        if locale.setlocale(locale.LC_ALL) != self.locale:
            locale.setlocale(locale.LC_ALL, self.locale)
        sys.setrecursionlimit(self.recursion_limit)


def main() -> None:
    """Loads the scoring functions named in the arguments, then serves."""
    for kind in sys.argv[1:]:
        scorer(kind)
    serve()


def serve() -> None:
    """Serves batches from stdin until it closes; writes a JSON line per sample to stdout.

    Both pipes are moved away first, so that a scoring function that prints or reads disturbs
    nothing. Results travel as JSON: what grades a model's text cannot send objects back. Never
    returns.
    """
    try:
        _serve()
    except SystemExit as ending:
        os._exit(ending.code if isinstance(ending.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _serve() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    # Open until the very end of the process: its closing tells the pool how the process ended.
    results = os.fdopen(os.dup(1), "wb", closefd=False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    surroundings = _Surroundings()
    surroundings.restore()
    _send(results, "ready")
    batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, batches), daemon=True).start()
    job: JobSpec | None = None
    configured: list[tuple[PartSpec, Scorer, Any]] = []
    while True:
        batch = batches.get()
        if batch.job is not None:
            job = batch.job
            configured = _configured(job)
        assert job is not None, "the first batch brings its job"
        _grade(batch.items, job, configured, results, surroundings)


def _receive(requests: BinaryIO, batches: "queue.SimpleQueue[Batch]") -> None:
    """Ends this process group when the parent closes the pipe, which its death does too."""
    while True:
        try:
            batch = pickle.load(requests)
        except EOFError:
            os.killpg(os.getpgid(0), signal.SIGKILL)
            return
        batches.put(batch)


def _configured(job: JobSpec) -> list[tuple[PartSpec, Scorer, Any]]:
    loaded = [(part, cast(Scorer, scorer(part.kind))) for part in job.parts]
    return [(part, module, module.Config(**part.options)) for part, module in loaded]


def _grade(
    items: tuple[RewardInput, ...],
    job: JobSpec,
    configured: list[tuple[PartSpec, Scorer, Any]],
    results: BinaryIO,
    surroundings: _Surroundings,
) -> None:
    grade_one = _score if job.mode == "score" else _check_gold
    for item in items:
        _limit_memory(job.memory_limit_bytes)
        signal.setitimer(signal.ITIMER_PROF, job.cpu_limit_s)
        scores = [grade_one(part, module, config, item) for part, module, config in configured]
        signal.setitimer(signal.ITIMER_PROF, 0)
        surroundings.restore()
        _send(results, [(score.value, score.status, score.reason) for score in scores])
        if any((score.reason or "").startswith(_OUT_OF_MEMORY) for score in scores):
            os._exit(OUT_OF_MEMORY_EXIT)


def _score(part: PartSpec, module: Scorer, config: Any, item: RewardInput) -> Score:
    try:
        return checked(module.score(item, config))
    except MemoryError:
        return Score(None, "grader_error", f"{_OUT_OF_MEMORY} in reward {part.name!r}")
    except Exception as error:
        return failed(error, part=part.name, item=item)


def _check_gold(part: PartSpec, module: Scorer, config: Any, item: RewardInput) -> Score:
    try:
        problem = module.check_gold(item.answer, item.extra, config)
    except Exception as error:
        return failed(error, part=part.name, item=item)
    return Score(1.0) if problem is None else Score(None, "grader_error", problem)


def _limit_memory(growth_bytes: int) -> None:
    """Lets the address space grow by so much from where it is now, whatever came before."""
    if sys.platform != "linux":  # Elsewhere RLIMIT_AS is not enforced.
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + growth_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _address_space() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split(maxsplit=1)[0]) * _PAGE_BYTES


def _send(results: BinaryIO, message: Any) -> None:
    results.write(json.dumps(message).encode("ascii") + b"\n")
    results.flush()


if __name__ == "__main__":
    main()
