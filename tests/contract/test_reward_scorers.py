"""What every scoring function promises; a new line in `rewards.SCORERS` is covered on arrival."""

import pickle
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rewards import SCORERS, needs, scorer
from rewards.contract import RewardInput, Score

KINDS = sorted(kind for kind in SCORERS if needs(kind) is None)

FRAGMENTS = [
    *["\\boxed{", "}", "<answer>", "</answer>", "<think>", "</think>", "\\frac{1}{2}", "\\sqrt{"],
    *["(", ")", "[", ",", "=", "<", "\\le ", "\\cup ", "\\pm ", "$", "%", "\\text{", " or ", "7"],
    *["x", "^", "_", "\\{", "\\}", "\x00", "\u202e", "\ud800", "−", "∞", "Final answer: ", "\n"],
]
GARBAGE = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
def test_gold_examples_score_the_maximum(kind: str) -> None:
    module: Any = scorer(kind)
    assert module.GOLD
    for example in module.GOLD:
        config = module.Config(**example.options)
        assert module.check_gold(example.item.answer, example.item.extra, config) is None
        assert module.score(example.item, config) == Score(example.value)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(completion=GARBAGE, index=st.integers(0, 10))
def test_garbage_never_raises_and_is_graded(kind: str, completion: str, index: int) -> None:
    module: Any = scorer(kind)
    example = module.GOLD[index % len(module.GOLD)]
    item = RewardInput(completion, answer=example.item.answer, extra=example.item.extra)
    score = module.score(item, module.Config(**example.options))
    assert score.status == "graded"
    assert score.value is not None
    assert example.least <= score.value <= example.value


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answer=GARBAGE)
def test_an_unusable_gold_is_never_a_reward(kind: str, answer: str) -> None:
    module: Any = scorer(kind)
    for example in module.GOLD:
        config = module.Config(**example.options)
        if module.check_gold(answer, {}, config) is not None:
            score = module.score(RewardInput(example.item.completion, answer=answer), config)
            assert (score.value, score.status) == (None, "grader_error")


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_completion_is_graded_and_earns_nothing(kind: str) -> None:
    module: Any = scorer(kind)
    for example in module.GOLD:
        item = RewardInput("", answer=example.item.answer, extra=example.item.extra)
        score = module.score(item, module.Config(**example.options))
        assert score.status == "graded"
        assert score.value is not None
        assert example.least <= score.value <= 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_items_configs_and_scores_survive_pickling(kind: str) -> None:
    module: Any = scorer(kind)
    for example in module.GOLD:
        config = module.Config(**example.options)
        item = pickle.loads(pickle.dumps(example.item))
        score = module.score(item, pickle.loads(pickle.dumps(config)))
        assert pickle.loads(pickle.dumps(score)) == module.score(example.item, config)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_samples_changes_no_score(kind: str) -> None:
    module: Any = scorer(kind)
    config = module.Config(**module.GOLD[0].options)
    items = [example.item for example in module.GOLD] + [
        RewardInput(text, answer=module.GOLD[0].item.answer) for text in ("", "\\boxed{1}", "x = 2")
    ]
    straight = {id(item): module.score(item, config) for item in items}
    shuffled = random.Random(5).sample(items, k=len(items))
    assert {id(item): module.score(item, config) for item in shuffled} == straight
