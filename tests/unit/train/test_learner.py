"""The learner's logprobs: shifted, tempered, and the same however samples are packed."""

import random

import numpy as np
import pytest

from tests.unit.train.lab import sample


def some_samples(seed: int = 0, groups: int = 3, size: int = 4):
    draw = random.Random(seed)
    made = []
    for group in range(groups):
        prompt = [draw.randrange(2, 32) for _ in range(3 + 2 * group)]
        for number in range(size):
            completion = [draw.randrange(2, 32) for _ in range(draw.randrange(1, 9))]
            made.append(sample(f"{group}/{number}", prompt=prompt, completion=completion))
    return made


def test_logprob_of_a_token_comes_from_the_position_before_it_a23(lab):
    logits = [[1, 0, 0], [0, 2, 0], [0, 0, 3], [1, 1, 0]]
    logprobs = lab("logits_head", [[float(value) for value in row] for row in logits], 1.0)
    ids = [2, 0, 1, 2]
    # In a row of prompt [2] and completion [0, 1, 2], position t predicts token t + 1. That the
    # packing asks for these positions is `test_every_completion_token_is_predicted_once...`.
    taken = [logprobs[position][ids[position + 1]] for position in range(3)]
    np.testing.assert_allclose(taken, [-0.551445, -0.239545, -0.094923], atol=1e-5)


def test_temperature_divides_logits_not_logprobs_a25(lab):
    ((first, *_),) = lab("logits_head", [[2.0, 1.0, 0.0]], 0.5)
    assert first == pytest.approx(-0.142932, abs=1e-5)
    ((raw, *_),) = lab("logits_head", [[2.0, 1.0, 0.0]], 1.0)
    assert raw == pytest.approx(-0.407606, abs=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_row_tokens": 1000, "micro_batch_tokens": 1000},  # one row a group, one micro-batch
        {"max_row_tokens": 1, "micro_batch_tokens": 1000},  # one row a completion, padded
        {"max_row_tokens": 14, "micro_batch_tokens": 30},  # in between
        {"max_row_tokens": 1000, "micro_batch_tokens": 1},  # each row alone
    ],
)
def test_packed_and_padded_equal_alone_a38(lab, tmp_path, family, limits):
    directory = tmp_path / family
    lab("make_model", directory, family, False)
    samples = some_samples()
    packed = lab("packed_logprobs", directory, samples, limits, 0.7)
    alone = lab("lone_logprobs", directory, samples, 0.7)
    assert packed.keys() == alone.keys()
    worst = max(
        abs(ours - theirs)
        for name in alone
        for ours, theirs in zip(packed[name], alone[name], strict=True)
    )
    # Logprobs of about -3.5 to -15 in float32.
    assert worst <= 5e-6


def test_dropout_is_switched_off(lab, tiny_model):
    assert '"attention_dropout": 0.5' in (tiny_model / "config.json").read_text()
    assert lab("dropout_of", tiny_model) == 0.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"n_routed_experts": 64}, "mixture of experts"),
        ({"vision_config": {"hidden_size": 8}}, "other inputs than text"),
        ({"final_logit_softcapping": 30.0}, "rescales its logits"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding-window"),
        ({"sliding_window": 4096}, "sliding-window"),
    ],
)
def test_model_that_cannot_be_trained_is_refused_by_name(lab, fields, words):
    message = lab("refusal", fields)
    assert words in message
    assert "SomeForCausalLM" in message


def test_window_that_is_not_used_is_no_reason_to_refuse(lab):
    assert lab("refusal", {"sliding_window": 4096, "use_sliding_window": False}) == ""
