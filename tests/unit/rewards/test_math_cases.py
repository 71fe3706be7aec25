import json
import threading
from pathlib import Path

import pytest

from rewards import math
from rewards.contract import RewardInput

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases_math.jsonl").read_text("utf-8").splitlines()
]

# Rules of grading that the cases do not reach: gold, completion, value.
PAIRS = [
    (r"\{1,2\}", r"\boxed{(1,2)}", 0),
    ("(1,2)", r"\boxed{\{1,2\}}", 0),
    ("(1,2)", r"\boxed{(1.0,2)}", 1),
    ("1,2", r"\boxed{x=1 \text{ or } x=2}", 1),
    (r"3 \text{ or } 4", r"\boxed{4} or \boxed{3}", 1),
    ("(0,1]", r"\boxed{0<x\le 1}", 1),
    (r"0<x\le 1", r"\boxed{(0,1]}", 1),
    (r"x\ge 2", r"\boxed{[2,\infty)}", 1),
    ("x<3", r"\boxed{x>3}", 0),
    (r"25\%", r"\boxed{0.25}", 1),
    (r"25\%", r"\boxed{25}", 0),
    (r"5\text{ m}", r"\boxed{5\text{ cm}}", 0),
    (r"5\text{ m}", r"\boxed{5 meters}", 1),
    (r"12\text{ cm}^2", r"\boxed{12\text{ cm}}", 0),
    ("1e-20", r"\boxed{1e-21}", 0),
    ("y=2x+1", r"\boxed{2x-y+1=0}", 1),
    ("2x+3y=6", r"\boxed{4x+6y=12}", 1),
    (r"\frac{1}{\sqrt{2}}", r"\boxed{\sqrt{2}/2}", 1),
    (r"\frac{1}{3}", r"\boxed{0.333333333}", 0),
    ("0.333333333", r"\boxed{1/3}", 1),
    (r"2\pi", r"\boxed{6.28318}", 0),
    ("6.283185", r"\boxed{2\pi}", 1),
    (r"\pm 3", r"\boxed{-3, 3}", 1),
    (r"1\pm\sqrt{2}", r"\boxed{1+\sqrt2, 1-\sqrt2}", 1),
    ("3", r"\boxed{\pm 3}", 0),
    ("(3,5)", r"\boxed{x=3, y=5}", 1),
    ("x=1,y=2", r"\boxed{y=2, x=1}", 1),
    ("x=1,y=2", r"\boxed{x=2, y=1}", 0),
    (r"\text{east}", r"\boxed{\text{seat}}", 0),
    ("45", r"\boxed{4 5}", 0),
    (r"\sqrt{10^{40}+1}", r"\boxed{10^{20}}", 0),
    ("2", r"\boxed{1.9999999}", 0),
    ("2.0", r"\boxed{1.9999999}", 1),
    ("3", r"\boxed{((9!)!)!}", 0),
    ("5!", r"\boxed{120}", 1),
    (r"\mathbb{R}", r"\boxed{(-\infty,\infty)}", 1),
    ("3", r"\boxed{(" + "(" * 3000 + "3" + ")" * 3000 + "}", 0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']}-{case['kind']}")
def test_casebook_answer_gets_its_verdict(case: dict) -> None:
    item = RewardInput(_text(case["completion"]), answer=case["gold"])
    score = math.score(item, math.Config())
    expected = "grader_error" if case["value"] is None else "graded"
    assert (score.value, score.status) == (case["value"], expected), score.reason


@pytest.mark.parametrize(("gold", "completion", "value"), PAIRS)
def test_answer_is_graded_by_the_rules(gold: str, completion: str, value: float) -> None:
    score = math.score(RewardInput(completion, answer=gold), math.Config())
    assert (score.value, score.status) == (value, "graded"), score.reason


def test_reasons_tell_a_missing_a_hedged_and_a_wrong_answer_apart() -> None:
    def reason(completion: str) -> str | None:
        return math.score(RewardInput(completion, answer="3"), math.Config()).reason

    assert reason("it is 3") == "no_final_answer"
    assert reason(r"\boxed{3 \text{ or } 4}") == "hedged"
    assert reason(r"\boxed{3} or \boxed{4}") == "hedged"
    assert reason(r"\boxed{4}") == "wrong"


def test_threads_give_the_verdict_of_the_main_thread() -> None:
    item = RewardInput(r"\boxed{\frac{1}{3}}", answer=r"\frac{2}{6}")
    values: list[float | None] = []
    threads = [
        threading.Thread(target=lambda: values.append(math.score(item, math.Config()).value))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [1.0] * 8


def test_model_text_reaches_no_evaluating_parser(tmp_path: Path) -> None:
    marker = tmp_path / "touched"
    code = f"__import__('os').system('touch {marker}')"
    for completion in (rf"\boxed{{{code}}}", f"<answer>{code}</answer>", f"Final answer: {code}"):
        assert math.score(RewardInput(completion, answer="0"), math.Config()).value == 0.0
    assert not marker.exists()


def _text(completion: str | dict) -> str:
    if isinstance(completion, str):
        return completion
    return completion["repeat"] * completion["times"] + completion["then"]
