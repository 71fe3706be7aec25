"""The trainer's processes end together, also when not all of them could be started."""

import stat
import sys
from pathlib import Path

import psutil
import pytest

from tasks.train.contract import TrainConfig
from tasks.train.ranks import Ranks


def test_ranks_that_were_started_end_when_a_later_one_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 600\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    (tmp_path / "rank-2.log").mkdir()
    before = set(psutil.Process().children())
    with pytest.raises(IsADirectoryError):
        Ranks(TrainConfig(ranks=3), model_dir=tmp_path, extensions=tmp_path, log_dir=tmp_path)
    assert [tmp_path.joinpath(f"rank-{rank}.log").is_file() for rank in (0, 1)] == [True, True]
    assert set(psutil.Process().children()) - before == set()
