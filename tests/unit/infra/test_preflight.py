"""What a machine is told before anything is downloaded."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra import preflight

REPOSITORY = Path(__file__).parents[3]


def fake_python(directory: Path, name: str, answer: str) -> Path:
    """Writes a program that answers as a Python of some version and equipment would."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return path


def run_preflight(**environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "infra.preflight"],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("module", ["home", "preflight", "install"])
def test_an_old_python_can_read_what_tells_it_that_it_is_old(module: str) -> None:
    source = (REPOSITORY / "infra" / f"{module}.py").read_text()
    ast.parse(source, feature_version=(3, 9))
    assert "from __future__ import annotations" in source


def test_this_machine_passes() -> None:
    result = run_preflight()
    assert result.returncode == 0, result.stdout
    assert result.stdout.startswith("machine: platform Linux x86_64")


def test_a_missing_compiler_is_named_with_its_remedy(tmp_path: Path) -> None:
    result = run_preflight(PATH=str(tmp_path))
    assert result.returncode == 1
    assert "MISS  compiler: no g++" in result.stdout
    assert "apt-get install g++" in result.stdout
    assert "nothing was downloaded" in result.stderr


def test_the_oldest_supported_python_that_has_everything_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python(tmp_path, "python3.13", "echo 3 13 1 1")
    wanted = fake_python(tmp_path, "python3.12", "echo 3 12 1 1")
    fake_python(tmp_path, "python3.11", "echo 3 11 0 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(fake_python(tmp_path, "old", "echo 3 9 1 1")))
    found = preflight.find_python()
    assert found is not None
    assert found.path == str(wanted)


def test_a_shim_that_only_complains_is_no_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = fake_python(tmp_path, "python3.11", "echo 'version 3.11 not installed' >&2; exit 127")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(shim))
    assert preflight.find_python() is None


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        ("echo 3 11 0 1", "apt-get install python3.11-venv"),
        ("echo 3 12 1 0", "apt-get install python3.12-dev"),
        ("echo 3 9 1 1", "Python 3.11 to 3.13 is needed"),
        ("echo 3 14 1 1", "Python 3.11 to 3.13 is needed"),
    ],
)
def test_what_a_python_lacks_is_said(
    answer: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(fake_python(tmp_path, "python3", answer)))
    findings = {finding.what: finding for finding in preflight.check(tmp_path)}
    assert remedy in (findings["Python"].remedy or "")
