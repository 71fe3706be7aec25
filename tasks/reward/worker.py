"""A grading process: scores one sample after the other and may be killed at any of them.

Started by `pool.py` as a child; never imported by the stage. The kernel ends it when a sample
exceeds its CPU seconds (SIGPROF), whatever code runs: no Python is needed to stop C.
"""

import json
import math
import os
import pickle
import queue
import resource
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

from rewards import scorer
from rewards.contract import RewardInput, Score, Scorer

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
class Batch:
    """Samples to score with every part, in order, and what one of them may cost.

    Mode `check_gold` looks at the data set's side only: a score without value names a bad gold.
    """

    mode: Literal["score", "check_gold"]
    parts: tuple[PartSpec, ...]
    items: tuple[RewardInput, ...]
    cpu_limit_s: float
    memory_limit_bytes: int


def main() -> None:
    """Serves batches from stdin until it closes; writes a JSON line per sample to stdout.

    Both pipes are moved away first, so that a scoring function that prints or reads disturbs
    nothing. Results travel as JSON: what grades a model's text cannot send objects back.
    """
    requests = os.fdopen(os.dup(0), "rb")
    # Open until the very end of the process: its closing tells the pool how the process ended.
    results = os.fdopen(os.dup(1), "wb", closefd=False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for kind in sys.argv[1:]:
        scorer(kind)
    _send(results, "ready")
    batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, batches), daemon=True).start()
    while True:
        _grade(batches.get(), results)


def _receive(requests: BinaryIO, batches: "queue.SimpleQueue[Batch]") -> None:
    """Ends this process group when the parent closes the pipe, which its death does too."""
    while True:
        try:
            batch = pickle.load(requests)
        except EOFError:
            os.killpg(os.getpgid(0), signal.SIGKILL)
            return
        batches.put(batch)


def _grade(batch: Batch, results: BinaryIO) -> None:
    loaded = [(part, cast(Scorer, scorer(part.kind))) for part in batch.parts]
    configured = [(part, module, module.Config(**part.options)) for part, module in loaded]
    grade_one = _score if batch.mode == "score" else _check_gold
    for item in batch.items:
        _limit_memory(batch.memory_limit_bytes)
        signal.setitimer(signal.ITIMER_PROF, batch.cpu_limit_s)
        scores = [grade_one(part, module, config, item) for part, module, config in configured]
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(results, [(score.value, score.status, score.reason) for score in scores])
        if any((score.reason or "").startswith(_OUT_OF_MEMORY) for score in scores):
            os._exit(OUT_OF_MEMORY_EXIT)


def _score(part: PartSpec, module: Scorer, config: Any, item: RewardInput) -> Score:
    """The one boundary at which a scoring function's errors become data."""
    try:
        return _checked(module.score(item, config))
    except MemoryError:
        return Score(None, "grader_error", f"{_OUT_OF_MEMORY} in reward {part.name!r}")
    except Exception as error:
        return _failed(part, item, error)


def _check_gold(part: PartSpec, module: Scorer, config: Any, item: RewardInput) -> Score:
    try:
        problem = module.check_gold(item.answer, item.extra, config)
    except Exception as error:
        return _failed(part, item, error)
    return Score(1.0) if problem is None else Score(None, "grader_error", problem)


def _checked(score: Score) -> Score:
    if score.status == "graded" and (score.value is None or not math.isfinite(score.value)):
        raise ValueError(f"a graded score needs a finite value, got {score.value}")
    return score


def _failed(part: PartSpec, item: RewardInput, error: Exception) -> Score:
    reason = (
        f"reward {part.name!r} raised {type(error).__name__} on sample {item.sample_id!r}: {error}"
    )
    return Score(None, "grader_error", reason)


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
