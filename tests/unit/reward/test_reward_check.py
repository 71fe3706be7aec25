"""A reward tried on a data set: what does not fit is found before a run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tasks.reward.check import CheckReport, Row, check_rewards
from tasks.reward.contract import RewardConfig, RewardPart
from tasks.reward.grading import Grading
from tasks.workspace import Workspace


def check(config: RewardConfig, rows: Sequence[Row], directory: Path) -> CheckReport:
    workspace = Workspace(cache=directory / "cache", scratch=directory)
    with Grading(config, workspace=workspace) as grading:
        return check_rewards(config, rows, grading=grading)


def row(number: int, answer: str | None, domain: str = "d") -> Row:
    return Row(row_id=str(number), domain=domain, prompt="?", answer=answer, extra={})


def test_golds_have_the_maximum_and_junk_has_not(tmp_path: Path) -> None:
    rows = [row(0, "1/2"), row(1, "3"), row(2, "3")]
    report = check(RewardConfig(parts=[RewardPart(kind="math")], workers=1), rows, tmp_path)
    (part,) = report.parts
    assert report.usable
    assert (part.num_golds, part.num_at_maximum) == (3, 3)
    assert (part.gold_mean, part.junk_mean) == (1.0, 0.0)
    assert part.samples_per_s is not None
    assert (report.majority_answer, report.num_answers) == ("3", 2)
    assert report.majority_share == 2 / 3


def test_golds_that_nobody_can_read_are_named(tmp_path: Path) -> None:
    rows = [row(0, "7"), row(1, r"\frac{1}{"), row(2, None)]
    report = check(RewardConfig(parts=[RewardPart(kind="math")], workers=1), rows, tmp_path)
    problems = {problem.what: problem for problem in report.parts[0].problems}
    unreadable = problems["gold answers that the grader cannot read"]
    assert [example.row_id for example in unreadable.examples] == ["1", "2"]
    assert "cannot be parsed" in (unreadable.examples[0].reason or "")
    assert not report.usable


def test_junk_that_earns_the_maximum_is_a_problem(tmp_path: Path) -> None:
    part = RewardPart(kind="format", options={"pattern": ".*"})
    report = check(RewardConfig(parts=[part], workers=1), [row(0, "7")], tmp_path)
    problems = {problem.what: problem.num_rows for problem in report.parts[0].problems}
    assert problems == {"junk with the maximum": 1}


def test_a_part_is_tried_on_its_own_domains_only(tmp_path: Path) -> None:
    config = RewardConfig(
        parts=[
            RewardPart(kind="numeric", domains=["sums"]),
            RewardPart(kind="exact", domains=["words"]),
        ],
        workers=1,
    )
    report = check(config, [row(0, "7", "sums"), row(1, "seven", "words")], tmp_path)
    assert report.usable
    assert [part.num_golds for part in report.parts] == [1, 1]


def test_rows_and_parts_that_do_not_meet_are_problems(tmp_path: Path) -> None:
    config = RewardConfig(
        parts=[
            RewardPart(kind="numeric", domains=["sums"]),
            RewardPart(kind="exact", domains=["wrods"]),
        ],
        workers=1,
    )
    rows = [row(0, "7", "sums"), row(1, "seven", "words")]
    report = check(config, rows, tmp_path)
    assert not report.usable
    assert [problem.num_rows for problem in report.parts[1].problems] == [0]
    (nobodys,) = report.problems
    assert [example.row_id for example in nobodys.examples] == ["1"]
    assert nobodys.examples[0].reason == "not for domain words"


def test_junk_is_tried_on_rows_of_the_parts_own_domain(tmp_path: Path) -> None:
    rows = [row(number, "7", "sums") for number in range(300)] + [row(300, "seven", "words")]
    config = RewardConfig(parts=[RewardPart(kind="format", domains=["words"])], workers=1)
    report = check(config, rows, tmp_path)
    assert report.parts[0].num_rows == 1
    assert report.parts[0].junk_mean is not None


@pytest.mark.parametrize(
    ("prompt", "marks", "is_found"),
    [
        ("Finish with 'Answer: <value>'. 6 times 6?", ["box"], False),
        ("Put it into \\boxed{}. 6 times 6?", ["box"], True),
        ("Write <answer>...</answer>. 6 times 6?", ["box"], False),
        ("6 times 6?", ["box"], True),
    ],
)
def test_m11_a_prompt_that_asks_for_another_form_than_is_graded_is_a_problem(
    tmp_path: Path, prompt: str, marks: list[str], is_found: bool
) -> None:
    part = RewardPart(kind="math", options={"marks": marks})
    rows = [Row(row_id="r", domain="d", prompt=prompt, answer="36", extra={})]
    report = check(RewardConfig(parts=[part], workers=1), rows, tmp_path)
    assert report.usable is is_found
    problems = [problem.what for problem in report.parts[0].problems]
    assert problems == [] or "form that their prompt asks for" in problems[0]


def test_a_line_that_the_prompt_asks_for_may_be_the_one_that_is_graded(tmp_path: Path) -> None:
    part = RewardPart(kind="math", options={"marks": ["line"], "line_prefix": "Answer"})
    prompt = "Finish with 'Answer: <value>'. 6 times 6?"
    rows = [Row(row_id="r", domain="d", prompt=prompt, answer="36", extra={})]
    assert check(RewardConfig(parts=[part], workers=1), rows, tmp_path).usable
