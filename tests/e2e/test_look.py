"""Looking at a real run through the command line: every question of QUERIES.md, its samples."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DOCUMENT = Path(__file__).parents[2] / "flows" / "QUERIES.md"
STEPS = 3


@pytest.fixture(scope="module")
def at(finished: Path) -> tuple[str, str]:
    return ("--store", str(finished))


def ask(cli: Cli, at: tuple[str, str], sql: str) -> list[dict]:
    return json.loads(cli.ok("sql", sql, "--json", *at))


def test_figures_over_samples_are_those_of_the_commits(cli: Cli, at: tuple[str, str]):
    rows = ask(
        cli,
        at,
        "select step, avg(s.reward) as reward, any_value(steps.reward_mean) as told, "
        "max(logprob_gap_max) as gap, max(staleness) as staleness, count(*) as samples "
        "from samples s join steps using (run, step) group by step order by step",
    )
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["reward"] == pytest.approx(row["told"])
        assert row["staleness"] == 0
        assert row["samples"] == 16 * 8
        # float32 on both sides: what DESIGN.md's weight proof allows.
        assert 0 < row["gap"] < 1e-3


def test_every_question_of_the_document_has_an_answer(cli: Cli, at: tuple[str, str]):
    found = re.findall(r"```sql\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    answers = [ask(cli, at, sql) for sql in found]
    assert [sql for sql, rows in zip(found, answers, strict=True) if not rows] == []


def test_samples_of_a_step_read_as_the_model_wrote_them(cli: Cli, at: tuple[str, str]):
    printed = cli.ok("samples", f"finished@{STEPS}", *at)
    assert printed.startswith(f"finished@{STEPS}  16 groups, 128 samples")
    chosen = json.loads(cli.ok("samples", "finished", "--worst", "3", "--best", "2", "--json", *at))
    samples = [sample for group in chosen["groups"] for sample in group["samples"]]
    assert sorted(sample["reward"] for sample in samples) == [0, 0, 0, 1, 1]
    for group in chosen["groups"]:
        for sample in group["samples"]:
            right = sample["completion"].removesuffix("<eos>") == group["answer"]
            assert sample["reward"] == float(right)
            assert sample["ratio_max"] == pytest.approx(1, abs=1e-3)


def test_a_terminal_gets_a_table_within_its_width(cli: Cli, at: tuple[str, str]):
    lines = cli.ok("sql", "select prompt, completion, reward from samples", *at).splitlines()
    assert lines[0].split() == ["prompt", "completion", "reward"]
    assert lines[-1].startswith("the first 100 of 384 rows")
    assert max(map(len, lines)) <= 120
