import json
import random
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reasoning_gym import create_dataset, get_score_answer_fn
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from rewards import reasoning_gym
from rewards.contract import RewardInput, Score
from tasks.prompts import reasoning_gym as data_set
from tasks.prompts.rows import content_id

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases_environments.jsonl").read_text("utf-8").splitlines()
]
CONFIG = reasoning_gym.Config()
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed file .*arcagi:ResourceWarning",
    "ignore:.*arcagi:pytest.PytestUnraisableExceptionWarning",
)
JUNK = ("qqq", "", "0", "True", "nan", "[NaN, NaN, NaN]", "[]", "None")


@cache
def made(name: str, index: int) -> str:
    """Returns an entry of the library as a row's JSON holds it; no two tests pay for one."""
    random.seed(index)
    np.random.seed(index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of programs that codeio runs.
        return json.dumps(data_set_of(name)[index], default=str)


@cache
def data_set_of(name: str) -> ProceduralDataset:
    # Of some seeds one task of sokoban takes half a minute.
    return create_dataset(name, size=4, seed=2)


def tasks(name: str, *, size: int) -> list[dict[str, Any]]:
    return [json.loads(made(name, index)) for index in range(size)]


def graded(text: str | None, entry: dict[str, Any], name: str) -> Score:
    extra = {"dataset": name, "metadata": entry["metadata"], "params": {}}
    item = RewardInput(f"<answer>{text}</answer>", answer=entry["answer"], extra=extra)
    return reasoning_gym.score(item, CONFIG)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_casebook_answer_gets_its_verdict(case: dict) -> None:
    extra = {"dataset": case["dataset"], "metadata": case["metadata"]}
    item = RewardInput(case["completion"], answer=case["answer"], extra=extra)
    score = reasoning_gym.score(item, CONFIG)
    if case["value"] is None:
        assert (score.value, score.status) == (None, "grader_error")
        assert case["reason"] in (score.reason or "")
        assert reasoning_gym.check_gold(case["answer"], extra, CONFIG) == score.reason
    else:
        assert score == Score(case["value"], reason=case["reason"])


@pytest.mark.parametrize("name", sorted(set(DATASETS) - set(reasoning_gym.REFUSED)))
def test_each_data_set_takes_its_own_answers_and_no_junk(name: str) -> None:
    kept = [entry for entry in tasks(name, size=2) if _problem(name, entry) is None]
    assert kept
    for entry in kept:
        oracle = entry["answer"]
        if oracle is None:
            oracle = _known_good(entry["metadata"])
        assert graded(oracle, entry, name) == Score(1.0)
        others = [text for text in JUNK if oracle not in (text, f"{text}.0")]
        assert [graded(text, entry, name).value for text in others] == [0.0] * len(others)


@pytest.mark.parametrize("name", ["rearc", "chain_sum", "gsm_symbolic", "number_sorting"])
def test_the_answer_of_another_task_is_wrong(name: str) -> None:
    first, second, third = tasks(name, size=3)
    answers = [(first, second), (second, third), (third, first)]
    assert [graded(other["answer"], entry, name).value for entry, other in answers] == [0.0] * 3


def test_every_refused_name_is_one_of_the_library_s() -> None:
    assert set(reasoning_gym.REFUSED) <= set(DATASETS)
    assert set(reasoning_gym.REFUSED).isdisjoint(reasoning_gym._EXAMPLES)


@pytest.mark.parametrize(
    ("name", "junk"),
    [
        ("coin_flip", lambda entry: "0"),
        ("game_of_life_halting", lambda entry: "qqq"),
        ("propositional_logic", lambda entry: entry["metadata"]["premises"][-1]),
        ("puzzle24", lambda entry: "6*4*1*1"),
    ],
)
def test_a_refused_verifier_still_accepts_junk(name: str, junk: Any) -> None:
    verifier = get_score_answer_fn(name)
    verdicts = [verifier(junk(entry), entry) for entry in tasks(name, size=4)]
    assert 1.0 in verdicts


@pytest.mark.parametrize("name", ["boxnet", "rush_hour"])
def test_a_refused_data_set_still_has_no_known_answer(name: str) -> None:
    for entry in tasks(name, size=3):
        assert entry["answer"] is None
        assert not [key for key in entry["metadata"] if "answer" in key or "solution" in key]


@pytest.mark.parametrize("name", sorted({*reasoning_gym._ALPHABETS, *reasoning_gym._ACCEPTED}))
def test_nothing_that_a_model_wrote_is_evaluated(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "touched"
    (entry,) = tasks(name, size=1)
    code = f"__import__('pathlib').Path('{marker}').touch()"
    for text in (code, f"({code} or 1)", f"[{code}]", f"x if {code} else x", f"sin({code})"):
        assert graded(text, entry, name).value == 0.0
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("bitwise_arithmetic", "problem"),
        ("simple_integration", "integrand"),
        ("intermediate_integration", "integrand"),
        ("number_sorting", "answer"),
        ("polynomial_multiplication", "answer"),
    ],
)
def test_nothing_that_a_row_says_is_evaluated(name: str, key: str, tmp_path: Path) -> None:
    marker = tmp_path / "touched"
    (entry,) = tasks(name, size=1)
    holder = entry if key == "answer" else entry["metadata"]
    holder[key] = f"__import__('pathlib').Path('{marker}').touch() or 1"
    score = graded("1", entry, name)
    assert (score.value, score.status) == (None, "grader_error")
    assert "without risk" in (score.reason or "")
    assert not marker.exists()


def test_digits_of_a_formula_are_read_in_linear_time() -> None:
    (entry,) = tasks("simple_integration", size=1)
    assert graded("1" * 5000 + "!", entry, "simple_integration").reason == "unreadable"


def test_a_tower_of_powers_is_no_answer_to_countdown() -> None:
    (entry,) = tasks("countdown", size=1)
    assert graded("9**9**9**9", entry, "countdown") == Score(0.0, reason="unreadable")


def test_verifiers_use_the_settings_that_made_the_task() -> None:
    # Within 10^-precision is right: 0.3 of 0.25 at one decimal place, not at the default of six.
    entry = {"answer": "0.25", "metadata": {}}
    extra = {"dataset": "decimal_arithmetic", "metadata": {}}
    item = RewardInput("<answer>0.3</answer>", answer="0.25", extra=extra)
    assert reasoning_gym.score(item, CONFIG).value == 0.0
    settings = {"params": {"min_num_decimal_places": 1, "max_num_decimal_places": 1}}
    made = RewardInput("<answer>0.3</answer>", answer=entry["answer"], extra=extra | settings)
    assert reasoning_gym.score(made, CONFIG).value == 1.0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "holds no reasoning-gym task"),
        ({"dataset": "gcd"}, "holds no reasoning-gym task"),
        ({"dataset": 3, "metadata": {}}, "holds no reasoning-gym task"),
        ({"dataset": "gcd", "metadata": {}, "params": [1]}, "holds no reasoning-gym task"),
        ({"dataset": "gdc", "metadata": {}}, "no data set 'gdc'"),
        ({"dataset": "composite", "metadata": {}}, "belong to other data sets"),
    ],
)
def test_a_row_that_is_no_task_is_an_error(extra: dict, message: str) -> None:
    problem = reasoning_gym.check_gold("3", extra, CONFIG)
    assert problem is not None
    assert message in problem
    score = reasoning_gym.score(RewardInput("<answer>3</answer>", answer="3", extra=extra), CONFIG)
    assert (score.value, score.status, score.reason) == (None, "grader_error", problem)


def test_a_verifier_that_runs_out_of_memory_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(text: str, task: object) -> float:
        raise MemoryError

    monkeypatch.setattr(reasoning_gym, "_verdict", exhausted)
    with pytest.raises(MemoryError):
        graded("3", {"answer": "3", "metadata": {}}, "gcd")


def test_rows_hold_what_the_grader_needs_and_what_it_cannot_grade_is_left_out() -> None:
    params = {"linear_lower_bound": 1}
    settings = {"dataset": "intermediate_integration", "seed": 94, "params": params}
    rows = data_set.read(data_set.Config(**settings, size=2))
    assert rows.dropped == {"repeated": 0, "ungradable": 1}
    (row,) = rows.train
    assert "Integral" not in (row.answer or "")
    assert row.extra["params"] == params
    assert row.row_id == content_id(row.prompt, row.answer, extra={}, where=row.where)
    assert reasoning_gym.check_gold(row.answer, row.extra, CONFIG) is None


def test_a_refused_data_set_can_still_be_drawn_for_another_reward() -> None:
    config = data_set.Config(dataset="game_of_life_halting", size=1)
    line = {"question": "?", "answer": "True", "metadata": {}}
    assert data_set._is_gradable(config, line)
    factors = data_set.Config(dataset="prime_factorization", size=1)
    assert not data_set._is_gradable(factors, line)


def _problem(name: str, entry: dict[str, Any]) -> str | None:
    extra = {"dataset": name, "metadata": entry["metadata"]}
    return reasoning_gym.check_gold(entry["answer"], extra, CONFIG)


def _known_good(metadata: dict[str, Any]) -> str:
    found = metadata.get("possible_answer", metadata.get("example_correct_answer"))
    return found if isinstance(found, str) else json.dumps(found)
