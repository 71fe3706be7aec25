"""`rollbook rewards`: graders tried from the command line."""

import json
from pathlib import Path

import pytest

from tests.unit.flows.test_cli import Command, rollbook

__all__ = ["rollbook"]


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLLBOOK_HOME", str(tmp_path))


def test_a_verdict_has_reward_status_reason_and_parts(rollbook: Command):
    printed, _ = rollbook(
        "rewards", "try", "math", "--gold", r"\frac{3}{4}", "--completion", "so 3/4", "--json"
    )
    assert json.loads(printed) == {
        "reward": 0.0,
        "status": "graded",
        "reason": "math: no_final_answer",
        "parts": [
            {
                "name": "math",
                "value": 0.0,
                "weight": 1.0,
                "status": "graded",
                "reason": "no_final_answer",
            }
        ],
    }


def test_a_recipes_whole_reward_is_tried_by_its_name(rollbook: Command):
    printed, _ = rollbook(
        "rewards", "try", "smollm2", "--gold", "k", "--completion", "so <answer>k</answer>"
    )
    assert printed.splitlines() == [
        "reward 1.000  format: wrong_format",
        "  exact: 1.000 x 1",
        "  format: 0.000 x 0.2  wrong_format",
    ]


def test_options_of_a_grader_are_set_one_by_one(rollbook: Command):
    arguments = ["rewards", "try", "exact", "--gold", "Paris", "--completion", "paris"]
    assert rollbook(*arguments, "--set", "whole=true")[0].startswith("reward 0.000")
    again = rollbook(*arguments, "--set", "whole=true", "--set", "ignore_case=true")[0]
    assert again.startswith("reward 1.000")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["try", "maths", "--completion", "x"], "Did you mean math"),
        (["try", "exact", "--completion", "x", "--set", "hole=true"], "no such setting"),
        (["try", "exact", "--completion", "x", "--extra", "[1]"], "Expected a JSON object"),
        (["try", "exact", "--completion", "x", "--set", f"a={'[' * 9999}"], "nested too deeply"),
        (["check", "adition"], "Did you mean addition"),
        (["check", "addition", "--set", "reward.parts.0.kind=mth"], "Did you mean math"),
    ],
)
def test_what_cannot_be_tried_ends_in_its_cause(
    rollbook: Command, arguments: list[str], cause: str
):
    assert cause in rollbook("rewards", *arguments)[1].strip().splitlines()[-1]


def test_a_service_that_is_away_is_a_verdict(rollbook: Command):
    judge = ["--set", "url=http://127.0.0.1:9", "--set", "rubric=r", "--set", "patience_s=0"]
    out = rollbook("rewards", "try", "judge", "--completion", "x", *judge, "--json")[0]
    assert json.loads(out)["status"] == "grader_error"


def test_a_recipes_golds_are_checked_and_junk_with_them(rollbook: Command):
    printed, _ = rollbook("rewards", "check", "smollm2", "--json")
    report = json.loads(printed)
    assert report["num_rows"] == 686
    exact, form = report["parts"]
    assert (exact["num_golds"], exact["num_at_maximum"], exact["junk_mean"]) == (686, 686, 0.0)
    assert (exact["problems"], form["problems"]) == ([], [])


def test_a_reward_that_does_not_fit_its_data_fails_the_check(rollbook: Command):
    printed, cause = rollbook("rewards", "check", "smollm2", "--set", "reward.parts.0.kind=numeric")
    assert "gold answers that the grader cannot read" in printed
    assert "The reward does not fit the data: 686 gold answers" in cause.splitlines()[-1]
