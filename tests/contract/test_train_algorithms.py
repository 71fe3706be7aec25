"""What every algorithm promises; runs over the dictionary, so a newcomer is covered on arrival."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from tasks.train.algorithms import ALGORITHMS
from tasks.train.algorithms.contract import GradedSample
from tests.unit.train.lab import Lab

EVERY = pytest.mark.parametrize("kind", sorted(ALGORITHMS))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    opened = Lab(tmp_path_factory.mktemp("lab") / "log")
    yield opened
    opened.close()


def tokens(kind: str, lengths: list[int], *, seed: int = 0) -> dict:
    """Random terms of several samples, one token in four masked."""
    draw = random.Random(seed)
    mask = [position % 4 != 3 for position in range(sum(lengths))]
    index = [sample for sample, length in enumerate(lengths) for _ in range(length)]
    counts = [sum(m for m, i in zip(mask, index, strict=True) if i == s) for s in set(index)]
    algorithm = ALGORITHMS[kind]
    weights = algorithm.sample_weights(counts, config=algorithm.Config())
    advantages = [draw.gauss(0, 1) for _ in lengths]
    return {
        "policy": [draw.uniform(-3, 0) for _ in mask],
        "old": [draw.uniform(-3, 0) for _ in mask],
        "rollout": [draw.uniform(-3, 0) for _ in mask],
        "advantages": [advantages[sample] for sample in index],
        "weights": [float(weights[sample]) for sample in index],
        "mask": mask,
        "sample_index": index,
    }


def part(terms: dict, start: int, stop: int) -> dict:
    cut = {name: values[start:stop] for name, values in terms.items()}
    first = cut["sample_index"][0]
    return {**cut, "sample_index": [index - first for index in cut["sample_index"]]}


@EVERY
def test_masked_tokens_carry_no_gradient(lab, kind):
    terms = tokens(kind, [5, 7, 3])
    said = lab("loss", kind, {}, "float64", terms)
    assert not all(terms["mask"])
    for gradient, value, unmasked in zip(
        said["gradient"], said["per_token"], terms["mask"], strict=True
    ):
        assert unmasked or (gradient == 0.0 and value == 0.0)
    assert any(said["gradient"])


@EVERY
def test_equal_rewards_give_zero_advantage(kind):
    algorithm = ALGORITHMS[kind]
    if not algorithm.GROUP_BASELINE:
        pytest.skip("declares no group baseline")
    samples = [GradedSample(str(n), "g", "graded", 0.3) for n in range(8)]
    judged = algorithm.advantages(samples, config=algorithm.Config())
    assert [verdict.advantage for verdict in judged.verdicts] == [0.0] * 8
    assert judged.num_zero_std_groups == 1


@EVERY
def test_splitting_a_batch_changes_nothing(lab, kind):
    terms = tokens(kind, [5, 7, 3])
    whole = lab("loss", kind, {}, "float64", terms)
    parts = [
        lab("loss", kind, {}, "float64", part(terms, start, stop))
        for start, stop in ((0, 5), (5, 15))
    ]
    assert sum(said["loss"] for said in parts) == pytest.approx(whole["loss"], rel=1e-12)
    joined = [value for said in parts for value in said["gradient"]]
    np.testing.assert_allclose(joined, whole["gradient"], rtol=1e-12)


@EVERY
def test_sample_without_a_reward_is_left_out_with_its_status(kind):
    algorithm = ALGORITHMS[kind]
    samples = [
        GradedSample("0", "g", "graded", 1.0),
        GradedSample("1", "g", "grader_error", None),
        GradedSample("2", "g", "graded", 0.0),
    ]
    judged = algorithm.advantages(samples, config=algorithm.Config())
    assert [verdict.kept for verdict in judged.verdicts] == [True, False, True]
    assert judged.verdicts[1].reason == "grader_error"


@EVERY
def test_order_of_samples_changes_nothing(kind):
    algorithm = ALGORITHMS[kind]
    samples = [GradedSample(str(n), f"g{n % 3}", "graded", float(n * n % 7)) for n in range(12)]
    config = algorithm.Config()
    forward = algorithm.advantages(samples, config=config).verdicts
    backward = algorithm.advantages(samples[::-1], config=config).verdicts
    np.testing.assert_allclose(
        [verdict.advantage for verdict in forward],
        [verdict.advantage for verdict in backward[::-1]],
        rtol=1e-12,
    )
