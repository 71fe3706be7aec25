"""A scoring function that does to its process what the completion says."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards.contract import GoldExample, RewardInput, Score, ScorerConfig


class Config(ScorerConfig):
    once: str | None = None


GOLD: Sequence[GoldExample] = ()


def score(item: RewardInput, config: Config) -> Score:
    act = item.completion
    if act == "spin":
        while True:
            pass
    if act == "spin_in_c":
        return Score(float(9**9**9 % 2))
    if act == "sleep":
        time.sleep(1000)
    if act == "bomb":
        return Score(float(len([bytearray(64 << 20) for _ in range(1000)])))
    if act == "raise":
        raise ZeroDivisionError("nothing to divide by")
    if act == "nan":
        return Score(float("nan"))
    if act == "print":
        sys.stdout.write("noise\n")
        sys.stdout.flush()
        sys.stdin.read()
    if act == "exit":
        sys.exit(3)
    if act == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if act == "die_once":
        assert config.once is not None
        marker = Path(config.once)
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if act.startswith("leave_child "):
        child = subprocess.Popen(["sleep", "1000"])
        Path(act.removeprefix("leave_child ")).write_text(str(child.pid))
        time.sleep(1000)
    if act.startswith("pid "):
        Path(act.removeprefix("pid ")).write_text(str(os.getpid()))
        time.sleep(1000)
    return Score(1.0)


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    return None if answer != "bad" else "it says bad"
