import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from storage.errors import NotFound
from storage.experience import read_shard, rows_to_table, write_shard
from storage.inputs import put_input
from storage.layout import StepScope
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import InputRef, ObjectRef
from storage.schemas import PROMPTS, REWARDS, SAMPLES
from storage.store_config import StoreConfig
from tasks.errors import Permanent
from tasks.reward.contract import RewardConfig, RewardPart, RewardRequest
from tasks.reward.grading import Grading
from tasks.reward.stage import check_golds, run
from tasks.workspace import Workspace
from tests.unit.reward.tokenizers_for_tests import END, write_tokenizer

SCOPE = StepScope(run="r", step=1)
EXACT_AND_FORMAT = RewardConfig(
    parts=[
        RewardPart(kind="exact", accuracy=True),
        RewardPart(kind="format", weight=0.2, options={"tags": ["answer"]}),
    ]
)


class Setup:
    """A store with a tokenizer, and a pool that grades what `write` puts there."""

    def __init__(self, directory: Path) -> None:
        self.store: ObjectStore = open_store(
            StoreConfig(uri=f"memory://{uuid.uuid4().hex}"), writing=True
        )
        self.tokenizer = write_tokenizer(directory / "model", special_tags=True)
        files = {path.name: path for path in (directory / "model").iterdir()}
        self.model: InputRef = put_input(self.store, files)
        self.workspace = Workspace(cache=directory / "cache", scratch=directory)
        self.grading = Grading(EXACT_AND_FORMAT, workspace=self.workspace)

    def write(
        self, answers: Sequence[str | None], completions: Sequence[Sequence[str]]
    ) -> tuple[ObjectRef, ObjectRef]:
        """Puts one group per answer; returns the samples and the prompts shard."""
        prompts = [_prompt_row(index, answer) for index, answer in enumerate(answers)]
        samples = [
            _sample_row(group, index, self.tokenizer.encode(text).ids)
            for group, texts in enumerate(completions)
            for index, text in enumerate(texts)
        ]
        return (
            write_shard(
                self.store, rows_to_table(samples, schema=SAMPLES), schema=SAMPLES, key="s"
            ),
            write_shard(
                self.store, rows_to_table(prompts, schema=PROMPTS), schema=PROMPTS, key="p"
            ),
        )

    def write_rows(
        self, rows: Sequence[dict[str, Any]], *, schema: pa.Schema, key: str
    ) -> ObjectRef:
        return write_shard(self.store, rows_to_table(rows, schema=schema), schema=schema, key=key)

    def request(self, shards: tuple[ObjectRef, ObjectRef], config: RewardConfig) -> RewardRequest:
        return RewardRequest(
            scope=SCOPE,
            shard=0,
            samples=shards[0],
            prompts=shards[1],
            model=self.model,
            config=config,
        )

    def run(self, request: RewardRequest) -> Any:
        return run(request, self.store, self.grading, workspace=self.workspace)

    def rows(self, result: Any) -> list[dict[str, Any]]:
        return read_shard(self.store, result.record.outputs["rewards"], schema=REWARDS).to_pylist()


@pytest.fixture
def setup(importable_fixtures: None, tmp_path: Path) -> Iterator[Setup]:
    opened = Setup(tmp_path)
    yield opened
    opened.grading.close()


def test_shard_holds_the_weighted_sum_and_its_parts(setup: Setup) -> None:
    shards = setup.write(
        ["7", "8"],
        [
            [f"<answer>7</answer>{END}", f"so <answer>7</answer>{END}"],
            [f"<answer>7</answer>{END}", END],
        ],
    )
    result = setup.run(setup.request(shards, EXACT_AND_FORMAT))
    rows = setup.rows(result)
    assert [row["sample_id"] for row in rows] == ["g0-0", "g0-1", "g1-0", "g1-1"]
    # exact + 0.2 x format: right and clean, right in prose, wrong but clean, nothing at all.
    assert [row["reward"] for row in rows] == [1.2, 1.0, 0.2, 0.0]
    assert [row["status"] for row in rows] == ["graded"] * 4
    assert rows[3]["reason"] == "exact: no_final_answer; format: wrong_format"
    assert rows[1]["parts"] == [
        {"name": "exact", "value": 1.0, "weight": 1.0, "status": "graded", "reason": None},
        {
            "name": "format",
            "value": 0.0,
            "weight": 0.2,
            "status": "graded",
            "reason": "wrong_format",
        },
    ]
    metrics = result.record.metrics
    assert metrics["reward_mean"] == pytest.approx(2.4 / 4)
    assert metrics["accuracy"] == 0.5
    assert metrics["part_format_mean"] == 0.5
    assert (metrics["num_samples"], metrics["num_graded"], metrics["graded_share"]) == (4, 4, 1.0)


def test_second_run_finds_the_record_and_writes_nothing(setup: Setup) -> None:
    request = setup.request(setup.write(["7"], [[f"<answer>7</answer>{END}"]]), EXACT_AND_FORMAT)
    first = setup.run(request)
    keys = [entry.key for entry in setup.store.list("")]
    second = setup.run(request)
    assert not first.reused
    assert second.reused
    assert second.record == first.record
    assert [entry.key for entry in setup.store.list("")] == keys


def test_same_request_gives_the_same_bytes_from_other_workers(setup: Setup) -> None:
    texts = [[f"<answer>{digit}</answer>{END}" for digit in range(8)] for _ in range(12)]
    shards = setup.write([str(index) for index in range(12)], texts)
    request = setup.request(shards, EXACT_AND_FORMAT)
    first = setup.run(request)
    config = EXACT_AND_FORMAT.model_copy(update={"workers": 3})
    with Grading(config, workspace=setup.workspace) as other:
        elsewhere = request.model_copy(update={"scope": StepScope(run="r", step=2)})
        second = run(elsewhere, setup.store, other, workspace=setup.workspace)
    assert not second.reused
    assert second.record.outputs["rewards"].sha256 == first.record.outputs["rewards"].sha256


def test_failed_sample_has_no_reward_but_a_status_and_a_reason(
    setup: Setup, misbehaving: Callable[..., RewardConfig]
) -> None:
    config = misbehaving(max_failed_share=0.5)
    shards = setup.write(["x"], [["spin" + END, "raise" + END, "a" + END, "b" + END]])
    result = setup.run(setup.request(shards, config))
    rows = setup.rows(result)
    assert [row["reward"] for row in rows] == [None, None, 1.0, 1.0]
    assert [row["status"] for row in rows] == ["grader_timeout", "grader_error", "graded", "graded"]
    assert rows[0]["reason"] == "took more than 1 CPU seconds"
    assert "'g0-1'" in rows[1]["reason"]
    assert result.record.notes == ["not replayable: g0-0: took more than 1 CPU seconds"]
    metrics = result.record.metrics
    assert (metrics["num_grader_timeout"], metrics["num_grader_error"]) == (1, 1)
    assert metrics["reward_mean"] == 1.0


def test_too_many_failures_stop_the_stage_before_it_writes(
    setup: Setup, misbehaving: Callable[..., RewardConfig]
) -> None:
    config = misbehaving(max_failed_share=0.4)
    shards = setup.write(["x"], [["raise" + END, "a" + END, "nan" + END, "b" + END]])
    keys = [entry.key for entry in setup.store.list("")]
    with pytest.raises(
        Permanent, match=r"2 of 4 samples have no reward \(1 grader_error: reward 'bad' raised"
    ) as error:
        setup.run(setup.request(shards, config))
    assert "g0-0, g0-2" in str(error.value)
    assert [entry.key for entry in setup.store.list("")] == keys


def test_end_mark_as_first_token_is_a_graded_zero(setup: Setup) -> None:
    result = setup.run(setup.request(setup.write(["7"], [[END]]), EXACT_AND_FORMAT))
    (row,) = setup.rows(result)
    assert (row["reward"], row["status"]) == (0.0, "graded")


def test_odd_characters_reach_the_shard(setup: Setup) -> None:
    texts = ["a\x00b" + END, "\u202e reversed" + END]
    result = setup.run(setup.request(setup.write(["x"], [texts]), EXACT_AND_FORMAT))
    assert [row["status"] for row in setup.rows(result)] == ["graded", "graded"]
    assert setup.rows(result)[0]["reason"] == "exact: no_final_answer; format: wrong_format"


def test_sample_without_its_prompt_is_an_error(setup: Setup) -> None:
    shards = setup.write(["7"], [[END], [END]])
    with pytest.raises(Permanent, match="g1"):
        setup.run(setup.request(shards, EXACT_AND_FORMAT))


def test_two_prompts_of_one_group_are_an_error(setup: Setup) -> None:
    samples, _ = setup.write(["7"], [[END]])
    rows = [_prompt_row(0, "7"), _prompt_row(0, "8")]
    prompts = setup.write_rows(rows, schema=PROMPTS, key="twice")
    with pytest.raises(Permanent, match="2 rows for 1 groups"):
        setup.run(setup.request((samples, prompts), EXACT_AND_FORMAT))


def test_missing_shard_is_not_found(setup: Setup) -> None:
    samples, prompts = setup.write(["7"], [[END]])
    gone = samples.model_copy(update={"key": "gone"})
    with pytest.raises(NotFound):
        setup.run(setup.request((gone, prompts), EXACT_AND_FORMAT))


def test_bad_golds_are_named_at_launch(tmp_path: Path) -> None:
    workspace = Workspace(cache=tmp_path / "cache", scratch=tmp_path)
    config = RewardConfig(parts=[RewardPart(kind="math")], workers=1, cpu_limit_s=2.0)
    rows = [
        {"prompt_id": "good", "domain": "d", "answer": r"\frac{1}{2}", "extra": None},
        {"prompt_id": "empty", "domain": "d", "answer": "", "extra": "{}"},
        {"prompt_id": "absent", "domain": "d", "answer": None, "extra": None},
        {"prompt_id": "torn", "domain": "d", "answer": r"\frac{1}{", "extra": None},
    ]
    check_golds(config, rows[:1], workspace=workspace)
    with pytest.raises(ValueError, match="3 of 4 prompts") as error:
        check_golds(config, rows, workspace=workspace)
    assert all(name in str(error.value) for name in ("empty", "absent", "torn"))
    assert "good" not in str(error.value).split("grade:")[1]


def test_unusable_configs_are_refused_at_launch() -> None:
    with pytest.raises(ValidationError, match="Did you mean exact"):
        RewardPart(kind="exat")
    with pytest.raises(ValidationError, match="ignore_caes"):
        RewardPart(kind="exact", options={"ignore_caes": True})
    with pytest.raises(ValidationError, match="several parts named exact"):
        RewardConfig(parts=[RewardPart(kind="exact"), RewardPart(kind="exact")])


def _prompt_row(group: int, answer: str | None) -> dict[str, Any]:
    return {
        "prompt_id": f"p{group}",
        "group_id": f"g{group}",
        "domain": "test",
        "prompt_token_ids": [1, 2, 3],
        "answer": answer,
        "extra": json.dumps({"level": group}),
    }


def _sample_row(group: int, index: int, token_ids: list[int]) -> dict[str, Any]:
    return {
        "sample_id": f"g{group}-{index}",
        "group_id": f"g{group}",
        "sample_index": index,
        "prompt_token_ids": [1, 2, 3],
        "completion_token_ids": token_ids,
        "completion_mask": [True] * len(token_ids),
        "rollout_logprobs": [-0.5] * len(token_ids),
        "finish_reason": "stop",
        "stop_token_id": token_ids[-1],
        "seed": index,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 16,
        "version_spans": [{"start": 0, "policy_version": 0, "policy_digest": "d"}],
    }
