"""A reward model over a real connection that answers as vLLM's `/pooling` does."""

import base64
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rewards import reward_model
from rewards.contract import RewardInput, Score
from tasks.reward.endpoint import HttpEndpoint
from tests.unit.reward.answering_service import Asked, Reply, Service, running

Grade = Callable[..., list[Score]]
LIMIT = 20


def packed(*logits: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(logits)}f", *logits)).decode()


def lengths(asked: Asked) -> Reply:
    """Logits are the length of the text and its negative; long texts are refused."""
    body = asked.body
    texts = body.get("input") or ["".join(turn["content"] for turn in body["messages"])]
    if body.get("truncate_prompt_tokens") == -1:
        texts = [text[:LIMIT] for text in texts]
    if any(len(text) > LIMIT for text in texts):
        return Reply({"error": {"message": "maximum context length is 20"}}, 400)
    rows = [
        {"index": index, "data": packed(float(len(text)), -float(len(text)))}
        for index, text in enumerate(texts)
    ]
    # By index, not by place.
    return Reply({"data": rows[::-1]})


@pytest.fixture
def service() -> Iterator[Service]:
    with running() as made:
        made.otherwise = lengths
        yield made


@pytest.fixture
def graded(service: Service) -> Iterator[Grade]:
    opened: list[HttpEndpoint] = []

    def grade(*items: RewardInput, **options: Any) -> list[Score]:
        settings = {"url": service.url, "model": "rm", "patience_s": 0.0}
        config = reward_model.Config(**(settings | options))
        opened.append(HttpEndpoint(config, url=config.url or "", cache=None))
        return list(reward_model.score_batch(items, config, opened[-1]))

    yield grade
    for each in opened:
        each.close()


def texts(*completions: str) -> list[RewardInput]:
    return [RewardInput(completion) for completion in completions]


def test_the_raw_logit_of_every_text_comes_back_in_order(service: Service, graded: Grade) -> None:
    scores = graded(*texts("a", "bbb", "cc", "d", "eeee"), batch=2)
    assert scores == [Score(1.0), Score(3.0), Score(2.0), Score(1.0), Score(4.0)]
    assert [len(asked.body["input"]) for asked in service.posted] == [2, 2, 1]
    assert {asked.path for asked in service.posted} == {"/pooling"}
    assert service.posted[0].body["use_activation"] is False


def test_another_label_scale_and_shift(graded: Grade) -> None:
    # -4 x 0.5 + 1 = -1
    assert graded(*texts("four"), label=1, scale=0.5, shift=1.0)[0].value == -1.0


def test_the_sigmoid_is_that_of_the_logit(service: Service, graded: Grade) -> None:
    for logit, expected in ((0.0, 0.5), (math.log(3), 0.75), (1e4, 1.0), (-1e4, 0.0)):
        service.script = [Reply({"data": [{"index": 0, "data": packed(logit)}]})]
        [score] = graded(*texts("x"), activation="sigmoid")
        assert score.value == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_costs_only_its_own_sample(
    logit: float, service: Service, graded: Grade
) -> None:
    rows = [{"index": 0, "data": packed(1.0)}, {"index": 1, "data": packed(logit)}]
    service.script = [Reply({"data": rows})]
    good, bad = graded(*texts("a", "b"))
    assert good == Score(1.0)
    assert (bad.value, bad.status) == (None, "grader_error")
    assert "the model's logit is" in (bad.reason or "")


def test_a_text_that_is_too_long_costs_only_its_own_sample(graded: Grade) -> None:
    first, second, third = graded(*texts("a", "b" * 30, "cc"))
    assert (first, third) == (Score(1.0), Score(2.0))
    assert (second.value, second.status) == (None, "grader_error")
    assert "maximum context length is 20" in (second.reason or "")


def test_a_text_that_is_too_long_is_cut_where_that_is_asked_for(
    service: Service, graded: Grade
) -> None:
    scores = graded(*texts("a", "b" * 30), truncate="left")
    assert scores == [Score(1.0), Score(20.0, reason="input_truncated")]
    assert service.posted[-1].body["truncation_side"] == "left"


@pytest.mark.parametrize(
    "answer",
    [
        {"data": [{"index": 0, "data": packed(1.0)}]},
        {"data": [{"index": 0, "data": packed(1.0)}] * 2},
        {"data": [{"index": 0, "data": packed(1.0)}, {"index": 2, "data": packed(1.0)}]},
        {"data": [{"index": 0, "data": packed(1.0)}, {"index": "1", "data": packed(1.0)}]},
        {"data": [{"index": 0, "data": "AAA"}, {"index": 1, "data": packed(1.0)}]},
        {"data": [{"index": 0, "data": "AAAA"}, {"index": 1, "data": packed(1.0)}]},
        {"data": [{"index": 0, "data": [[1.0]]}, {"index": 1, "data": [1.0]}]},
        {"data": None},
        {"probs": [1.0]},
        [],
        "text",
        None,
    ],
)
def test_an_answer_that_cannot_be_matched_is_asked_for_text_by_text(
    answer: Any, service: Service, graded: Grade
) -> None:
    service.script = [Reply(answer)]
    assert graded(*texts("a", "bb")) == [Score(1.0), Score(2.0)]
    service.otherwise = lambda _: Reply(answer)
    if answer != {"data": [{"index": 0, "data": packed(1.0)}]}:
        for score in graded(*texts("a", "bb")):
            assert (score.value, score.status) == (None, "grader_error")
            assert "the reward model" in (score.reason or "")


def test_plain_numbers_are_understood_too(service: Service, graded: Grade) -> None:
    service.script = [Reply({"data": [{"index": 0, "data": [0.25, 3]}]})]
    assert graded(*texts("a"), label=1)[0].value == 3.0


def test_a_label_that_the_model_lacks_is_an_error(graded: Grade) -> None:
    [score] = graded(*texts("a"), label=2)
    assert (score.status, score.reason) == (
        "grader_error",
        "the model has 2 labels, and `label` is 2",
    )


def test_the_text_is_the_template_filled_once(service: Service, graded: Grade) -> None:
    item = RewardInput("{prompt}", prompt="<|im_start|>q")
    graded(item, template="{prompt}{completion}<e>")
    graded(item)
    assert [asked.body["input"] for asked in service.posted] == [
        ["<|im_start|>q{prompt}<e>"],
        ["<|im_start|>q{prompt}"],
    ]
    assert service.posted[0].body["add_special_tokens"] is False


def test_turns_are_sent_one_sample_a_request_with_their_marks_broken(
    service: Service, graded: Grade
) -> None:
    items = [
        RewardInput("x<|im_end|>", prompt="templated", extra={"question": "Why?"}),
        RewardInput("", prompt="templated", extra={"question": "Who?"}),
    ]
    assert [score.value for score in graded(*items, messages=True, prompt_field="question")] == [
        16.0,
        4.0,
    ]
    assert [asked.body["messages"] for asked in service.posted] == [
        [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "x< |im_end|>"}],
        [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": ""}],
    ]
    config = reward_model.Config(url=service.url, messages=True)
    assert reward_model.batch_items(config) == 1


def test_thinking_is_hidden_where_that_is_asked_for(service: Service, graded: Grade) -> None:
    graded(*texts("<think>a</think>b"))
    graded(*texts("<think>a</think>b"), show_thinking=False)
    assert [asked.body["input"] for asked in service.posted] == [["<think>a</think>b"], ["b"]]


def test_rows_without_a_question_or_any_text_are_named_and_not_sent(
    service: Service, graded: Grade
) -> None:
    [empty] = graded(RewardInput(""))
    assert (empty.status, service.posted) == ("grader_error", [])
    items = [RewardInput("a"), RewardInput("b", extra={"question": "Why?"})]
    lost, fine = graded(*items, prompt_field="question")
    assert lost.status == "grader_error"
    assert "'question'" in (lost.reason or "")
    assert fine == Score(5.0)


def test_texts_that_utf8_cannot_hold_are_sent_with_a_replacement(
    service: Service, graded: Grade
) -> None:
    graded(*texts("a\ud800b", "\ud83d\ude00"))
    assert service.posted[0].body["input"] == ["a\ufffdb", "😀"]


def test_a_service_that_is_away_is_for_the_stage_to_judge(graded: Grade) -> None:
    with running() as gone:
        pass
    with pytest.raises(OSError, match=f"{gone.url}.* gave no answer"):
        graded(*texts("a", "b"), url=gone.url)
    assert graded() == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"template": "{prompt}"}, "lacks {completion}"),
        ({"template": "{completion}{gold}"}, "placeholder {gold}"),
        ({"messages": True, "template": "{completion}"}, "Leave template out"),
        ({"scale": 0.0}, "every reward would be the shift"),
        ({"label": -1}, "greater than or equal to 0"),
        ({"url": None}, "one of the two"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        reward_model.Config(**({"url": "http://h"} | options))
