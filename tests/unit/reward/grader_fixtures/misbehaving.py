"""A scoring function that does to its process what the completion says."""

import decimal
import os
import random
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


def _change_surroundings(_: str) -> float:
    os.chdir("/")
    os.environ["LEFT_BEHIND"] = "yes"
    decimal.getcontext().prec = 3
    random.seed(5)
    sys.setrecursionlimit(5000)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    return 1.0


def _look_around(_: str) -> float:
    first = decimal.getcontext().prec == 28 and "LEFT_BEHIND" not in os.environ
    return float(first and Path.cwd() != Path("/") and sys.getrecursionlimit() != 5000)


def _ignore_the_limit(_: str) -> float:
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    return _spin("")


def _fork_and_spin(note: str) -> float:
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    Path(note).write_text(str(child))
    return _spin("")


def _close_everything(_: str) -> float:
    os.closerange(0, 64)
    return 1.0


def _stop_itself(note: str) -> float:
    Path(note).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


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
    "draw": lambda _: random.random(),
    "change": _change_surroundings,
    "look": _look_around,
    "ignore_limit": _ignore_the_limit,
    "fork": _fork_and_spin,
    "close": _close_everything,
    "stop": _stop_itself,
    "slow": lambda _: time.sleep(1.0) or 1.0,
}
