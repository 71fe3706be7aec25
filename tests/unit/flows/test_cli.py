import sys
from collections.abc import Callable

import pytest

from flows import cli
from flows.recipes import RECIPES

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def rollbook(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process; returns what it printed to stdout and stderr."""
    for name in ("DO_NOT_TRACK", "PREFECT_SERVER_ANALYTICS_ENABLED"):
        monkeypatch.setenv(name, "false")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(cli, "after_interrupt", [])

    def run(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["rollbook", *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


def test_the_help_of_launch_lists_the_recipes_a_line_each(rollbook: Command):
    lines = [line.strip() for line in rollbook("launch", "--help")[0].splitlines()]
    for name, recipe in RECIPES.items():
        assert f"{name}: {(recipe.__doc__ or '').splitlines()[0]}" in lines


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["launch"], "recipe"),
        (["launch", "addition", "--setps", "1"], "--setps"),
        (["launch", "addition", "--steps", "0"], "--steps"),
        (["lanuch"], "lanuch"),
        (["launch", "additon"], "There is no recipe 'additon'. Did you mean addition?"),
        (["rewards", "check", "smolm2"], "There is no recipe 'smolm2'. Did you mean smollm2?"),
    ],
)
def test_a_usage_error_ends_in_its_cause(rollbook: Command, arguments: list[str], cause: str):
    assert cause in rollbook(*arguments)[1].strip().splitlines()[-1]


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_resume_says_how_to_go_on(
    rollbook: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flows.run.resume_run", interrupted)
    printed = rollbook("resume", "one", "--store", "a dir")[1]
    assert "rollbook resume one --store 'a dir'` goes on" in printed.splitlines()[-1]


def test_an_interrupted_launch_says_when_it_can_go_on(
    rollbook: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flows.run.train_run", interrupted)
    printed = rollbook("launch", "addition", "--run", "one", "--store", "dir")[1]
    assert "if the run was made" in printed.splitlines()[-1]
    assert "rollbook resume one --store dir` goes on" in printed.splitlines()[-1]
