"""What `flows/QUERIES.md` says people can ask, asked of a run whose answers are worked out here.

Run `r`: two steps of four groups with two samples, `yes` (reward 1) and `no` (reward 0). In step 2
the `no` of the last group timed out, and the learner finds the second token of group 1's `yes`
likelier by exp(0.5). Run `f` is forked from r@2 and made one step.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from flows.query import query
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig
from tests.contract.sampled_run import SampledRun, Shape

DOCUMENT = Path(__file__).parents[3] / "flows" / "QUERIES.md"
QUERIES = re.findall(r"```sql\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
SHAPE = Shape(timed_out=((2, 3, 1),), gaps=(((2, 1, 0), 0.5),))


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLBOOK_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    folder = tmp_path_factory.mktemp("store")
    opened = open_store(StoreConfig(uri=str(folder)), writing=True)
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    run = SampledRun(opened, tokenizer, shape=SHAPE).write(2)
    run.evaluate(2)
    SampledRun(opened, tokenizer, run="f", parent=run.parent_ref()).write(1)
    return opened


def asked(store: ObjectStore, heading: str, number: int = 0, run: str | None = "r") -> list[Any]:
    """The rows of the query under a heading, without their names."""
    part = DOCUMENT.read_text().split(f"## {heading}")[1].split("\n##")[0]
    sql = re.findall(r"```sql\n(.*?)```", part, re.DOTALL)[number]
    return [tuple(row.values()) for row in query(sql, store=store, run=run).to_pylist()]


def test_reward_by_prompt_over_time(store: ObjectStore):
    # set/0 is asked by groups 0 and 3: in step 2 rewards 1, 0, 1 and none.
    rows = asked(store, "1. Reward by prompt")
    assert rows[:2] == [("set/0", 1, 0.5, 4), ("set/0", 2, pytest.approx(2 / 3), 4)]
    assert rows[2:] == [(f"set/{n}", step, 0.5, 2) for n in (1, 2) for step in (1, 2)]


def test_the_most_common_failure_reasons(store: ObjectStore):
    assert asked(store, "2. The most common") == [
        ("format", "graded", "wrong", "stop", 7, 7 / 16),
        ("format", "grader_timeout", "took more than 5 s", "stop", 1, 1 / 16),
    ]


def test_samples_with_the_largest_gap(store: ObjectStore):
    rows = asked(store, "3. Samples with the largest gap")
    expected = ("r", 2, "group-000000005-0", pytest.approx(math.exp(0.5)), 4, "yes<|im_end|>")
    assert rows[0] == expected
    assert [row[3] for row in rows[1:]] == [1.0] * 9


def test_coverage_of_what_was_planned(store: ObjectStore):
    assert asked(store, "4. Coverage") == [
        ("r", 1, 4, 4, 8, 8, 8, 0, 0),
        ("r", 2, 4, 4, 8, 8, 7, 1, 0),
    ]


def test_coverage_of_the_data_set(store: ObjectStore):
    # Three of four prompts are drawn; set/0 twice in each of two steps.
    assert asked(store, "4. Coverage", 1) == [("r", "set", 4, 3, 0.75, 4)]


def test_length_against_reward(store: ObjectStore):
    # `no` and the end mark are 3 tokens, `yes` and it 4.
    assert asked(store, "5. Length against") == [
        (3, 8, 0.0, 0.0, pytest.approx(1.0)),
        (4, 8, 1.0, 0.0, pytest.approx(1.0)),
    ]


def test_the_steps_of_a_prompt(store: ObjectStore):
    assert asked(store, "6. The steps")[:2] == [
        ("r", "set/0", [1, 1, 2, 2], 4),
        ("r", "set/1", [1, 2], 2),
    ]


def test_staleness_is_zero_in_lockstep(store: ObjectStore):
    assert asked(store, "7. How stale") == [("r", 1, 0, 0, 1), ("r", 2, 0, 0, 1)]


def test_groups_that_teach_nothing(store: ObjectStore):
    # In step 2 the last group has one graded sample, which is right.
    assert asked(store, "8. Groups that") == [("r", 1, 4, 0, 0, 0), ("r", 2, 4, 1, 0, 0)]


def test_held_out_prompts_that_are_wrong(store: ObjectStore):
    assert asked(store, "9. Held-out") == [("r", 2, "set/1", "yes", "no<|im_end|>", 0.0)]


def test_policies_that_can_be_exported(store: ObjectStore):
    rows = asked(store, "10. What can be exported")
    assert rows == [("r", version, f"p{version}", 7e-6, False, None) for version in (0, 1, 2)]


def test_runs_beside_each_other(store: ObjectStore):
    assert asked(store, "Runs beside", run=None) == [
        ("f", "r", "0.5", 3, 0.5, None),
        ("r", None, "0.5", 2, 0.5, None),
    ]


def test_a_fork_with_the_steps_of_its_parents(store: ObjectStore):
    rows = asked(store, "Runs beside", 1, run=None)
    assert [row[:3] for row in rows] == [
        *(("f", "r", step) for step in (0, 1, 2)),
        ("f", "f", 3),
        *(("r", "r", step) for step in (0, 1, 2)),
    ]


def test_the_python_lines_run(store: ObjectStore):
    code = PYTHON[0].replace('"DIR"', "store").replace('"mine"', '"r"')
    names: dict[str, Any] = {"store": store}
    exec(code, names)
    assert names["table"].num_rows == 2
    assert names["samples"].to_table(columns=["reward"]).num_rows == 16
    assert names["connection"].sql("select count(*) from steps").fetchall() == [(5,)]


def test_every_query_of_the_document_is_asked_here():
    assert len(QUERIES) == 13
    assert len(PYTHON) == 1
