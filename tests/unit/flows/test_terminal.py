import shlex
from pathlib import Path

import pytest

from flows.show import EvalSummary, RunSummary
from flows.stores import store_options
from flows.terminal import next_commands, print_summary


def summary(store: str, *, suite: str = "held_out") -> RunSummary:
    found = EvalSummary(step=0, suite=suite, accuracy=0.5, low=0.4, high=0.6, num_prompts=9)
    return RunSummary(
        run="one",
        store=store,
        endpoint=None,
        recipe="addition",
        head_step=3,
        head_digest="d",
        policy_version=3,
        policy_digest="d",
        steps=[],
        evals=[found],
    )


def test_the_next_commands_name_a_store_that_is_not_the_default():
    options = store_options("a dir", "http://host:1")
    for command in next_commands(summary("a dir"), options):
        assert shlex.split(command)[-4:] == ["--store", "a dir", "--endpoint", "http://host:1"]


def test_the_next_commands_start_where_the_program_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert all(
        Path(shlex.split(command)[0]).is_file()
        for command in next_commands(summary("s"), ["--store", "s"])
    )
    (tmp_path / "rollbook").write_text("#!/bin/sh\n")
    (tmp_path / "rollbook").chmod(0o755)
    assert next_commands(summary("s"), ["--store", "s"])[0] == "rollbook show one --json --store s"


def test_brackets_in_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]):
    print_summary(summary("dir[bold]", suite="greedy[/]"))
    printed = capsys.readouterr().out
    assert "dir[bold]" in printed
    assert "greedy[/]" in printed
