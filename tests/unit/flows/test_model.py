"""The process that makes a model: what it may say, and that it ends with its caller."""

import os
import stat
from pathlib import Path
from typing import cast

import pytest

from flows import model
from flows.config import RunConfig
from flows.progress import Watcher
from flows.recipes import RECIPES
from tests.unit.service.conftest import is_gone


class Heard:
    """Keeps what is begun; a Ctrl-C comes at the line that `interrupt_at` names."""

    def __init__(self, interrupt_at: str | None = None) -> None:
        self.lines: list[str] = []
        self._interrupt_at = interrupt_at

    def begin(self, what: str) -> None:
        """Keeps a line."""
        self.lines.append(what)
        if what == self._interrupt_at:
            raise KeyboardInterrupt


def made_by(script: Path, text: str) -> RunConfig:
    """Returns a config whose engines' interpreter is a shell script."""
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    config = RECIPES["addition"]()
    return config.model_copy(
        update={"train": config.train.model_copy(update={"python": str(script)})}
    )


def test_a_maker_that_warns_at_length_is_not_stopped_by_it(tmp_path: Path):
    config = made_by(tmp_path / "python", "echo one; head -c 300000 /dev/zero >&2; echo last")
    heard = Heard()
    assert model._origins(config, "x", watcher=cast(Watcher, heard)) == "last"
    assert heard.lines == ["one", "last"]


def test_a_maker_that_fails_is_quoted(tmp_path: Path):
    config = made_by(tmp_path / "python", "echo noise >&2; echo the cause >&2; exit 1")
    with pytest.raises(ValueError, match=r"^the cause$"):
        model._origins(config, "x", watcher=cast(Watcher, Heard()))


def test_a_maker_ends_with_an_interrupted_launch(tmp_path: Path):
    config = made_by(
        tmp_path / "python", f"sleep 600 & echo $$ $! > {tmp_path}/pids; echo begun; wait"
    )
    with pytest.raises(KeyboardInterrupt):
        model._origins(config, "x", watcher=cast(Watcher, Heard(interrupt_at="begun")))
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert os.getpid() not in pids
    assert [pid for pid in pids if not is_gone(pid)] == []
