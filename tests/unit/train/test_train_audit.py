"""Advantages judged again from stored experience: what a forged row or figure looks like."""

import math
import uuid
from typing import Any

import pytest

from storage.audit_findings import CUT, EXACTLY_ONCE, NO_SILENT_ZERO, REPLAY, Tally
from storage.backends.memory import MemoryStore
from storage.experience import rows_to_table, write_shard
from storage.records import ObjectRef, RecordRef, StageRecord
from storage.schemas import REWARDS, SAMPLES, TRAIN
from tasks.train.audit import audit_train
from tasks.train.contract import TrainConfig
from tasks.train.experience import figures, judge, read_experience

Rows = list[dict[str, Any]]
REF = RecordRef(stage="train", key="record", sha256="", request_digest="")
CONFIG = TrainConfig(learning_rate=0.1, warmup_updates=4)

# Rewards 1 and 0: mean 0.5, standard deviation (ddof 1) sqrt(0.5), so +-0.5 / (sqrt(0.5) + 1e-6).
ADVANTAGE = 0.5 / (math.sqrt(0.5) + 1e-6)


class Trained:
    """One group of two graded samples and one that its grader failed on."""

    def __init__(self) -> None:
        self.store = MemoryStore(uuid.uuid4().hex)
        self.samples = self.write([_sample(index) for index in range(3)], SAMPLES, "samples")
        rewards = [_reward("g-0", 1.0), _reward("g-1", 0.0), _reward("g-2", None)]
        self.rewards = self.write(rewards, REWARDS, "rewards")
        self.rows: Rows = [
            _verdict("g-0", ADVANTAGE),
            _verdict("g-1", -ADVANTAGE),
            _verdict("g-2", None, reason="grader_error"),
        ]
        experience = read_experience(self.store, samples=[self.samples], rewards=[self.rewards])
        self.metrics = {**figures(experience, judge(experience, CONFIG)), "learning_rate": 0.05}

    def write(self, rows: Rows, schema: Any, key: str) -> ObjectRef:
        return write_shard(self.store, rows_to_table(rows, schema=schema), schema=schema, key=key)

    def audit(
        self, config: TrainConfig = CONFIG, **metrics: float | None
    ) -> tuple[Tally, list[str]]:
        body = {"config": config.model_dump(mode="json"), "update_index": 1}
        record = StageRecord(
            stage="train",
            request=body,
            request_digest="",
            outputs={"train": self.write(self.rows, TRAIN, "train")},
            attempt="a",
            environment={},
            environment_digest="",
            metrics={**self.metrics, **metrics},
        )
        tally = Tally()
        audit_train(
            self.store, REF, record, samples=[self.samples], rewards=[self.rewards], tally=tally
        )
        return tally, [f"{finding.promise} {finding.text}" for finding in tally.findings]


def _sample(index: int) -> dict[str, Any]:
    return {
        "sample_id": f"g-{index}",
        "group_id": "g",
        "sample_index": index,
        "prompt_token_ids": [5],
        "completion_token_ids": [6, 1],
        "completion_mask": [True, True],
        "rollout_logprobs": [-0.5, -0.5],
        "finish_reason": "stop",
        "stop_token_id": 1,
        "seed": index,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 2,
        "version_spans": [],
    }


def _reward(sample_id: str, reward: float | None) -> dict[str, Any]:
    status = "grader_error" if reward is None else "graded"
    return {"sample_id": sample_id, "reward": reward, "status": status, "parts": []}


def _verdict(sample_id: str, advantage: float | None, reason: str | None = None) -> dict[str, Any]:
    return {
        "sample_id": sample_id,
        "group_id": "g",
        "advantage": advantage,
        "kept": reason is None,
        "reason": reason,
        "learner_logprobs": [-0.5, -0.5] if reason is None else None,
    }


@pytest.fixture
def trained() -> Trained:
    return Trained()


def test_verdicts_that_follow_from_experience_hold(trained: Trained):
    tally, said = trained.audit()
    assert said == []
    assert (tally.counts["samples kept"], tally.counts["samples dropped grader_error"]) == (2, 1)
    assert tally.maxima["advantage difference"] < 1e-12


def test_an_advantage_may_differ_in_its_last_bits_and_no_further(trained: Trained):
    trained.rows[0]["advantage"] = ADVANTAGE + 1e-10
    tally, said = trained.audit()
    assert said == []
    assert tally.maxima["advantage difference"] == pytest.approx(1e-10, rel=1e-3)
    trained.rows[0]["advantage"] = ADVANTAGE + 1e-6
    assert trained.audit()[1][0].startswith(f"{REPLAY} train: expected row 0: advantage")


def test_a_sample_without_a_reward_that_was_trained_breaks_the_promise(trained: Trained):
    trained.rows[2] = _verdict("g-2", 0.0)
    said = trained.audit()[1]
    assert any(
        line.startswith(f"{NO_SILENT_ZERO} ") and "g-2 (grader_error)" in line for line in said
    )


def test_a_sample_that_is_missing_or_dropped_in_silence_is_named(trained: Trained):
    trained.rows[2]["reason"] = None
    assert any(line.startswith(f"{EXACTLY_ONCE} ") for line in trained.audit()[1])
    del trained.rows[2]
    assert any("sample ids" in line for line in trained.audit()[1])


def test_learner_logprobs_are_there_for_whatever_was_trained(trained: Trained):
    trained.rows[0]["learner_logprobs"] = [-0.5]
    assert any("learner logprobs of g-0" in line for line in trained.audit()[1])


def test_a_rate_or_a_figure_that_does_not_follow_is_named(trained: Trained):
    # Update 1 of a warm-up of 4 has 2 / 4 of the rate: 0.05.
    assert trained.audit(learning_rate=0.1)[1][0].startswith(f"{CUT} record: expected metric")
    assert trained.audit(samples_kept=3.0)[1][0].startswith(f"{REPLAY} record: expected metric")
    assert trained.audit(reward_mean=None)[1] != []


def test_a_config_that_would_keep_an_auditor_busy_for_ever_is_refused(trained: Trained):
    with pytest.raises(ValueError, match="Expected at most 100000 updates"):
        trained.audit(CONFIG.model_copy(update={"epochs": 10**30}))
