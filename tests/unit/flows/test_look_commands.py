"""`rollbook sql` and `rollbook samples` as commands."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import cli
from storage.opening import open_store
from storage.store_config import StoreConfig
from tests.contract.sampled_run import SampledRun

Command = Callable[..., tuple[str, str, int]]


@pytest.fixture
def rollbook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs a command over a store with run `r` of two steps; returns stdout, stderr and status."""
    store = open_store(StoreConfig(uri=str(tmp_path / "store")), writing=True)
    SampledRun(store, tmp_path / "tokenizer").write(2)
    names = {"ROLLBOOK_HOME": str(tmp_path / "home"), "COLUMNS": "100"}
    for name, value in {**names, "DO_NOT_TRACK": "1"}.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> tuple[str, str, int]:
        words = ["rollbook", *arguments, "--store", str(tmp_path / "store")]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return printed.out, printed.err, int(end.value.code or 0)

    return run


def test_sql_prints_a_table_json_or_csv(rollbook: Command):
    asked = "select step, avg(reward) as reward from samples group by step order by step"
    assert [line.split() for line in rollbook("sql", asked)[0].splitlines()] == [
        ["step", "reward"],
        ["1", "0.5"],
        ["2", "0.5"],
        ["2", "rows"],
    ]
    rows = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5}]
    assert json.loads(rollbook("sql", asked, "--run", "r", "--json")[0]) == rows
    assert rollbook("sql", asked, "--csv")[0] == "step,reward\n1,0.5\n2,0.5\n"


def test_sql_without_a_question_says_what_can_be_asked(rollbook: Command):
    printed = rollbook("sql")[0]
    assert "samples: a row per sample" in printed
    assert "sample_id" in printed


def test_sql_that_writes_ends_in_one_line_that_says_so(rollbook: Command):
    printed, errors, status = rollbook("sql", "drop view steps")
    assert (printed, status) == ("", 1)
    assert errors.splitlines()[-1].startswith("error: DROP is refused: `rollbook sql` only reads.")


def test_sql_shows_where_a_question_is_wrong_above_its_cause(rollbook: Command):
    lines = rollbook("sql", "select rewrd from steps")[1].splitlines()
    assert lines[-1].startswith('error: Referenced column "rewrd" not found')
    assert "rewrd" in lines[0]


def test_json_and_csv_exclude_each_other(rollbook: Command):
    assert "Expected one of them" in rollbook("sql", "from steps", "--json", "--csv")[1]


def test_samples_prints_groups_or_chosen_samples(rollbook: Command):
    printed = rollbook("samples", "r@1")[0]
    assert printed.startswith("r@1  4 groups, 8 samples  reward 0.500")
    assert "4 of 4 groups" in printed
    printed = rollbook("samples", "r@1", "--worst", "1")[0]
    assert "group-000000000-1" in printed
    assert printed.count("advantage") == 1


def test_samples_as_json_are_those_that_were_chosen(rollbook: Command):
    found = json.loads(rollbook("samples", "r", "--group", "4", "--json")[0])
    assert (found["run"], found["step"], found["num_groups"]) == ("r", 2, 4)
    assert [sample["completion"] for sample in found["groups"][0]["samples"]] == [
        "yes<|im_end|>",
        "no<|im_end|>",
    ]


def test_samples_of_no_step_end_in_their_cause(rollbook: Command):
    _, errors, status = rollbook("samples", "r@0")
    assert status == 1
    assert "kind genesis" in errors.splitlines()[-1]
