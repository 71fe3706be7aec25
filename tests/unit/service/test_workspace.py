"""Scratch directories belong to one living process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.workspace import open_workspace, trim_cache

HOLDER = """
import pathlib, sys, time
import pytest

from tasks.workspace import open_workspace, trim_cache
with open_workspace(pathlib.Path(sys.argv[1])) as workspace:
    (workspace.scratch / "big").write_text("x")
    print(workspace.scratch, flush=True)
    time.sleep(300)
"""


def test_scratch_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    with open_workspace(tmp_path) as workspace:
        (workspace.scratch / "draft").write_text("x")
        assert workspace.scratch.stat().st_mode & 0o777 == 0o700
        assert workspace.cache.is_dir()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_two_workspaces_of_one_process_do_not_meet(tmp_path: Path) -> None:
    with open_workspace(tmp_path) as first, open_workspace(tmp_path) as second:
        assert first.scratch != second.scratch
        assert first.cache == second.cache


def test_scratch_of_a_living_process_stays_and_of_a_killed_one_goes(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    theirs = Path(holder.stdout.readline().strip())
    with open_workspace(tmp_path):
        assert (theirs / "big").exists()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    with open_workspace(tmp_path):
        assert not theirs.exists()


def test_the_oldest_large_files_of_the_cache_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLBOOK_CACHE_GIB", str(5 / 1024))
    for age, name in enumerate(["ab/newest", "cd/middle", "ef/oldest"]):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_bytes(bytes(2 << 20))
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "ef" / "small").write_bytes(b"tokenizer")
    os.utime(tmp_path / "ef" / "small", (1, 1))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base").write_bytes(bytes(9 << 20))
    trim_cache(tmp_path)
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["base", "middle", "newest", "small"]
