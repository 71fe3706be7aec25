import time

import pytest

from rewards.answer import AnswerConfig, final_answer, visible_text
from rewards.contract import RewardInput


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"\boxed{4} then \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{total }=\boxed{12}}", "12"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\fbox{7}", "7"),
        (r"\\\boxed{7}", "7"),
        ("<answer>4</answer> so \\boxed{5}", "5"),
        ("\\boxed{5} so <answer>4</answer>", "4"),
        (r"<answer>\boxed{5}</answer>", "5"),
        ("<answer><answer>5</answer>", "5"),
        ("Final Answer: **73**", "73"),
        ("### Final answer\n\n**58**\n", "58"),
        ("**Final Answer**\n\n$\\boxed{58}$", "58"),
        ("The final answer is 5", None),
        (r"the number is 16", None),
        (r"\boxed{4", None),
        ("<answer>4", None),
        (r"\boxed{3} or \boxed{4", "3"),
        ("", None),
    ],
)
def test_the_last_marked_answer_counts(completion: str, expected: str | None) -> None:
    found = final_answer(RewardInput(completion), AnswerConfig())
    assert (found.text if found else None) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"\boxed{3} or \boxed{4}.", ("3", "4")),
        ("<answer>3</answer> or maybe <answer>4</answer>", ("3", "4")),
        (r"\boxed{2}, or \boxed{3}, or \boxed{4}", ("2", "3", "4")),
        (r"\boxed{3} or \boxed{3}", ()),
        (r"Is it \boxed{3}? Or not. \boxed{4}", ()),
        (r"\boxed{3} and \boxed{4}", ()),
        (r"\boxed{840}, for more or less. **Final Answer** \boxed{841}", ()),
    ],
)
def test_alternatives_in_one_sentence_are_seen(completion: str, expected: tuple) -> None:
    found = final_answer(RewardInput(completion), AnswerConfig())
    assert found is not None
    assert found.alternatives == expected


@pytest.mark.parametrize(
    ("completion", "prompt", "expected"),
    [
        ("<think>a</think>b", None, "b"),
        ("<think>a</think>b<think>c</think>d", None, "b\nd"),
        ("b<think>never closed", None, "b"),
        ("a</think>b", None, "b"),
        ("a</think>b", "user: x <think>\n", "b"),
        ("never closed", "user: x <think>\n", ""),
        ("open", "x <think></think>", "open"),
    ],
)
def test_thinking_is_not_visible(completion: str, prompt: str | None, expected: str) -> None:
    assert visible_text(completion, prompt=prompt).strip() == expected


def test_marks_can_be_limited_to_the_recipe_s_format() -> None:
    item = RewardInput("Answer: 36 and \\boxed{7}")
    line = final_answer(item, AnswerConfig(marks=("line",), line_prefix="Answer"))
    tag = final_answer(item, AnswerConfig(marks=("tag",)))
    assert line is not None
    assert line.text == "36 and \\boxed{7}"
    assert tag is None


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "<answer>", "{", "<think>", "\\boxed{1} or ", "\n", " ", "Final answer "]
)
def test_hostile_repetition_is_read_in_linear_time(piece: str) -> None:
    def seconds(times: int) -> float:
        item = RewardInput(piece * times)
        begin = time.process_time()
        final_answer(item, AnswerConfig())
        return time.process_time() - begin

    seconds(1_000)
    # 16 times the text: linear takes 16 times as long, quadratic 256 times.
    assert seconds(160_000) < 80 * seconds(10_000) + 0.2


@pytest.mark.parametrize("text", ["6 * 12\n#### 72", "####72", "so\n#### 72\nbye"])
def test_a_line_may_be_opened_by_signs_alone(text: str) -> None:
    found = final_answer(RewardInput(text), AnswerConfig(marks=("line",), line_prefix="####"))
    assert found is not None
    assert found.text == "72"
