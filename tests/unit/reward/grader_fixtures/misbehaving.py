"""A scoring function that does to its process what the completion says."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards.contract import GoldExample, RewardInput, Score, ScorerConfig


class Config(ScorerConfig):
    once: str | None = None


GOLD: Sequence[GoldExample] = ()


def score(item: RewardInput, config: Config) -> Score:
    word, _, argument = item.completion.partition(" ")
    act = ACTS.get(word)
    return Score(act(argument or config.once or "") if act else 1.0)


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    return None if answer != "bad" else "it says bad"


def _spin(_: str) -> float:
    while True:
        pass


def _sleep(_: str) -> float:
    time.sleep(1000)
    return 1.0


def _raise(_: str) -> float:
    raise ZeroDivisionError("nothing to divide by")


def _print_and_read(_: str) -> float:
    sys.stdout.write("noise\n")
    sys.stdout.flush()
    return float(len(sys.stdin.read()) + 1)


def _die_once(marker: str) -> float:
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def _leave_child(note: str) -> float:
    child = subprocess.Popen(["sleep", "1000"])
    Path(note).write_text(str(child.pid))
    return _sleep("")


def _note_pid(note: str) -> float:
    Path(note).write_text(str(os.getpid()))
    return _sleep("")


ACTS: dict[str, Callable[[str], float]] = {
    "spin": _spin,
    "spin_in_c": lambda _: float(9**9**9 % 2),
    "sleep": _sleep,
    "bomb": lambda _: float(len([bytearray(64 << 20) for _ in range(1000)])),
    "raise": _raise,
    "nan": lambda _: float("nan"),
    "print": _print_and_read,
    "exit": lambda _: sys.exit(3),
    "segfault": lambda _: float(bool(os.kill(os.getpid(), signal.SIGSEGV))),
    "die_once": _die_once,
    "leave_child": _leave_child,
    "pid": _note_pid,
}
