"""The trainer on real DeepSpeed ranks: same bits cold and warm, one loss however divided."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from storage.policies import policy_digest
from tasks.errors import Permanent, Transient
from tasks.train.contract import AlgorithmConfig, TrainConfig, Update
from tests.unit.train.lab import Lab, sample

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LAYOUTS = {
    "one": {"ranks": 1, "zero_stage": 2},
    "two": {"ranks": 2, "zero_stage": 2},
    "two-z3": {"ranks": 2, "zero_stage": 3},
    "one-bf16": {"ranks": 1, "zero_stage": 2, "dtype": "bfloat16"},
}
EVERY = pytest.mark.parametrize("layout", list(LAYOUTS))
FLOAT32 = pytest.mark.parametrize("layout", ["one", "two", "two-z3"])


def config_of(layout: str, **fields) -> TrainConfig:
    # With eps 1 Adam's first step is about the gradient itself, so that gradients can be compared
    # through the weights; cap 1 with unlikely rollout logprobs makes every weight w exactly 1.
    return TrainConfig(
        learning_rate=1.0,
        adam_eps=1.0,
        clip_norm=1e6,
        micro_batch_tokens=64,
        max_row_tokens=40,
        algorithm=AlgorithmConfig(options={"importance_cap": 1.0}),
        **{**LAYOUTS[layout], **fields},
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    opened = Lab(tmp_path_factory.mktemp("lab") / "log")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def model(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    lab("make_model", directory, "qwen2", True)
    return directory


@pytest.fixture(scope="module")
def engines(lab: Lab, model: Path, tmp_path_factory: pytest.TempPathFactory):
    """Opens each layout's engine when first asked for it."""
    opened: dict[str, list[int]] = {}
    scratch = tmp_path_factory.mktemp("scratch")

    def open_once(layout: str) -> list[int]:
        if layout not in opened:
            opened[layout] = lab("open_engine", layout, config_of(layout), model, scratch)
        return opened[layout]

    open_once.again = lambda layout: (  # type: ignore[attr-defined]
        lab("close_engine", layout),
        opened.pop(layout),
        open_once(layout),
    )
    yield open_once
    for layout in opened:
        lab("close_engine", layout)


def experience(seed: int, *, groups: int = 4, size: int = 4):
    draw = random.Random(seed)
    made = []
    for group in range(groups):
        prompt = [draw.randrange(2, 32) for _ in range(draw.randrange(3, 9))]
        for number in range(size):
            completion = [draw.randrange(2, 32) for _ in range(draw.randrange(1, 9))]
            name = f"{group}/{number}"
            advantage = draw.gauss(0, 1)
            made.append(
                sample(name, prompt=prompt, completion=completion, advantage=advantage, rollout=-99)
            )
    return made


def update(lab: Lab, layout: str, *seeds: int, temperature: float = 1.0):
    updates = [Update(experience(seed), 1.0) for seed in seeds]
    return lab("engine", layout, "update", updates, temperature=temperature)


def published(lab: Lab, layout: str, directory: Path, *, max_file_bytes: int = 1 << 30) -> str:
    directory.mkdir()
    lab("engine", layout, "save_policy", directory, max_file_bytes=max_file_bytes)
    return policy_digest(directory)


@EVERY
def test_cold_start_from_a_snapshot_gives_the_bits_of_a_warm_engine(
    lab, engines, model, tmp_path, layout
):
    engines(layout)
    for _ in range(2):  # a rerun gives the same bits, too
        lab("engine", layout, "initialise", model)
        update(lab, layout, 1)
        update(lab, layout, 2, temperature=0.7)
        before = lab("engine", layout, "state_digest")
    (tmp_path / "snapshot").mkdir()
    assert lab("engine", layout, "save_snapshot", tmp_path / "snapshot") == before
    update(lab, layout, 3)
    warm = published(lab, layout, tmp_path / "warm"), lab("engine", layout, "state_digest")

    engines.again(layout)
    lab("engine", layout, "restore", tmp_path / "snapshot")
    assert lab("engine", layout, "state_digest") == before
    update(lab, layout, 3)
    cold = published(lab, layout, tmp_path / "cold"), lab("engine", layout, "state_digest")
    assert cold == warm
    assert cold[1] != before


def masters_after_one_update(lab: Lab, layout: str, model: Path, directory: Path):
    lab("engine", layout, "initialise", model)
    told = update(lab, layout, 1)
    directory.mkdir()
    lab("engine", layout, "save_snapshot", directory)
    return told, lab("masters", directory)


@pytest.mark.parametrize("layout", ["two", "two-z3"])
def test_ranks_and_micro_batches_change_nothing_beyond_1e_6(lab, engines, model, tmp_path, layout):
    engines("one")
    engines(layout)
    one, one_masters = masters_after_one_update(lab, "one", model, tmp_path / "one")
    other, other_masters = masters_after_one_update(lab, layout, model, tmp_path / "other")
    for name in ("loss", "grad_norm", "entropy"):
        assert other.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5)
    assert other.metrics["tokens"] == one.metrics["tokens"]
    for name, said in one.learner_logprobs.items():
        np.testing.assert_allclose(other.learner_logprobs[name], said, atol=5e-6)
    assert one_masters.keys() == other_masters.keys()
    worst = max(np.abs(one_masters[key] - other_masters[key]).max() for key in one_masters)
    moved = one.metrics["grad_norm"]
    assert worst <= 1e-6 * max(moved, 1.0)


def constant_losses(*losses_and_lengths: tuple[float, int]):
    return [
        sample(
            f"{number}/0",
            prompt=[5 + number, 6],
            completion=[7] * length,
            advantage=-token_loss,
            rollout=-99,
        )
        for number, (token_loss, length) in enumerate(losses_and_lengths)
    ]


@EVERY
@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(1.0, 2), (2.0, 6)], 1.75),  # A11: (2 + 12) / 8, not the mean of micro-batch means
        ([(1.0, 10)] * 8, 1.0),  # A13: several micro-batches, one denominator
        ([(3.0, 4)], 3.0),  # one sample: the other rank only fills in
    ],
)
def test_loss_is_the_token_mean_over_ranks_and_micro_batches(
    lab, engines, model, layout, pieces, expected
):
    engines(layout)
    lab("engine", layout, "initialise", model)
    told = lab("engine", layout, "update", [Update(constant_losses(*pieces), 0.0)], temperature=1.0)
    assert told.metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert told.metrics["tokens"] == sum(length for _, length in pieces)


@EVERY
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_loss_that_is_not_finite_names_samples_and_leaves_weights(lab, engines, model, layout, bad):
    engines(layout)
    lab("engine", layout, "initialise", model)
    update(lab, layout, 1)
    before = lab("engine", layout, "state_digest")
    samples = experience(2)
    samples[5] = sample(
        "1/1", prompt=samples[5].prompt_token_ids, completion=[3, 4], advantage=float(bad)
    )
    with pytest.raises(Permanent, match=r"NaN or Inf, from samples 1/1\."):
        lab("engine", layout, "update", [Update(samples, 1.0)], temperature=1.0)
    assert lab("engine", layout, "state_digest") == before
    assert lab("engine", layout, "state_id") is None
    # Nothing of the bad gradient stays behind: the next update is the one it would have been.
    update(lab, layout, 3)
    after = lab("engine", layout, "state_digest")
    lab("engine", layout, "initialise", model)
    update(lab, layout, 1)
    update(lab, layout, 3)
    assert lab("engine", layout, "state_digest") == after


@FLOAT32
def test_several_updates_fix_old_logprobs_at_the_start(lab, engines, model, layout):
    engines(layout)
    lab("engine", layout, "initialise", model)
    single = update(lab, layout, 1)
    lab("engine", layout, "initialise", model)
    double = update(lab, layout, 1, 1)
    assert double.metrics["updates"] == 2
    for name, said in single.learner_logprobs.items():
        np.testing.assert_allclose(double.learner_logprobs[name], said, atol=5e-6)
    # The second pass sees ratios that left the clip range.
    assert single.metrics["clip_fraction"] == 0
    assert double.metrics["clip_fraction"] > 0


@EVERY
def test_s20_published_policy_loads_in_transformers_and_says_what_the_learner_says(
    lab, engines, model, tmp_path, layout
):
    engines(layout)
    lab("engine", layout, "initialise", model)
    update(lab, layout, 1)
    published(lab, layout, tmp_path / "policy")
    token_ids = [[5, 6, 7, 8, 9, 10], [3, 3, 3, 4, 4, 4]]
    probe = lab("engine", layout, "probe", token_ids)
    (tmp_path / "policy" / "config.json").write_bytes((model / "config.json").read_bytes())
    tolerance = 1e-4 if LAYOUTS[layout].get("dtype") is None else 0.2
    for row, ids in enumerate(token_ids):
        logits = np.array(lab("loaded_logits", tmp_path / "policy", ids))
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        taken = [logprobs[position, token] for position, token in enumerate(ids[1:])]
        assert probe.logprobs[row][0] is None
        np.testing.assert_allclose(probe.logprobs[row][1:], taken, atol=tolerance)
        assert probe.next_logprobs[row] == pytest.approx(logprobs[-1].max(), abs=tolerance)


def test_file_size_limit_does_not_change_the_policy_digest(lab, engines, model, tmp_path):
    engines("one")
    lab("engine", "one", "initialise", model)
    whole = published(lab, "one", tmp_path / "whole")
    assert published(lab, "one", tmp_path / "cut", max_file_bytes=9000) == whole
    assert len(list((tmp_path / "cut").iterdir())) > 1


def test_state_moves_to_other_ranks_and_zero_stage_to_the_bit(lab, engines, model):
    engines("two-z3")
    lab("engine", "two-z3", "initialise", model)
    update(lab, "two-z3", 1)
    lab("engine", "two-z3", "adopt", "some state")
    before = lab("engine", "two-z3", "state_digest")
    lab("engine", "two-z3", "configure", config_of("one"))
    assert len(lab("engine", "two-z3", "pids")) == 1
    assert lab("engine", "two-z3", "state_digest") == before
    assert lab("engine", "two-z3", "state_id") == "some state"
    lab("engine", "two-z3", "configure", config_of("two-z3", dtype="bfloat16"))
    assert lab("engine", "two-z3", "state_digest") == before
    assert update(lab, "two-z3", 1).metrics["grad_norm"] > 0
    engines.again("two-z3")


def test_s19_state_of_two_ranks_is_the_same_under_one_and_under_four(lab, engines, model):
    engines("two")
    lab("engine", "two", "initialise", model)
    update(lab, "two", 1)
    lab("engine", "two", "adopt", "some state")
    masters_and_moments = lab("engine", "two", "state_digest")
    for ranks in (1, 4):
        lab("engine", "two", "configure", config_of("two", ranks=ranks))
        assert len(lab("engine", "two", "pids")) == ranks
        assert lab("engine", "two", "state_digest") == masters_and_moments
    assert update(lab, "two", 1).metrics["grad_norm"] > 0
    engines.again("two")


def test_snapshot_of_another_model_is_refused(lab, engines, model, tmp_path):
    engines("one")
    lab("engine", "one", "initialise", model)
    with pytest.raises(Permanent, match=r"has no '(step|master)"):
        lab("engine", "one", "restore", tmp_path)


def test_base_model_that_is_not_finite_is_refused_by_tensor(lab, engines, tmp_path):
    pids = engines("one")
    lab("make_model", tmp_path / "bad", "qwen2", True)
    lab("spoil", tmp_path / "bad", "model.norm.weight", float("inf"))
    with pytest.raises(Permanent, match=r"'model\.norm\.weight'.*NaN or Inf"):
        lab("engine", "one", "initialise", tmp_path / "bad")
    assert lab("engine", "one", "pids") == pids  # what all ranks refuse, they survive


def test_base_model_of_another_architecture_is_refused(lab, engines, tmp_path):
    engines("one")
    lab("make_model", tmp_path / "other", "llama", True)
    with pytest.raises(Permanent, match="has no tensor"):
        lab("engine", "one", "initialise", tmp_path / "other")


def test_killed_rank_costs_its_state_and_leaves_nothing(lab, engines, model):
    engines("two")
    lab("engine", "two", "initialise", model)
    pids = lab("engine", "two", "pids")
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(Transient, match="rank 1 ended with code -9"):
        update(lab, "two", 1)
    assert lab("engine", "two", "pids") == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    lab("engine", "two", "initialise", model)
    assert update(lab, "two", 1).metrics["tokens"] > 0


def test_ranks_end_when_their_parent_is_killed(lab, model, tmp_path):
    alone = Lab(tmp_path / "log")
    pids = alone("open_engine", "two", config_of("two"), model, tmp_path)
    alone.process.kill()
    alone.process.wait(10)
    alone.close()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_running_ranks_have_no_name_in_shared_memory_to_leave_behind(lab, engines):
    assert engines("two")
    assert not list(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
