"""Replay on real vLLM: a stored shard comes out again, and what was never sampled stands out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.experience import read_shard, rows_to_table, write_shard
from storage.layout import StepScope, attempt_key
from storage.ledger import put_record, record_ref
from storage.records import ObjectRef, SamplingPolicy, StageRecord
from storage.schemas import PROMPTS, SAMPLES
from tasks.rollout.contract import ReplayRequest, ReplayResult, RolloutConfig, RolloutRequest
from tests.e2e.rollout_lab import LIMITS, Child, Stored, child, make_models, put_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCOPE = StepScope(run="r", step=1)
WARM = SamplingPolicy(group_size=4, temperature=0.6, max_tokens=40, stop_token_ids=[1])
LENGTHS = [3, 2, 60, 5, 94, 7]
"""Prompt lengths: with 96 tokens of context, three prompts leave less room than 40 tokens."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "rollout-home"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    models = make_models(tmp_path_factory.getbasetemp() / "rollout-models")
    return put_model(models, "llama-tied", uri=tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def prompts(stored: Stored) -> ObjectRef:
    rows = [
        {
            "prompt_id": f"p{row}",
            "group_id": f"g{row}",
            "domain": "test",
            "prompt_token_ids": [3 + (row + at) % 60 for at in range(length)],
        }
        for row, length in enumerate(LENGTHS)
    ]
    key = attempt_key(SCOPE, "a", "prompts.parquet")
    table = rows_to_table(rows, schema=PROMPTS)
    return write_shard(stored.store, table, schema=PROMPTS, key=key)


@pytest.fixture(scope="module")
def request_of(stored: Stored, prompts: ObjectRef) -> RolloutRequest:
    return RolloutRequest(
        scope=SCOPE,
        shard=0,
        prompts=prompts,
        start=0,
        stop=len(LENGTHS),
        sampling=WARM,
        seed=7,
        policy=stored.policies["v1"],
        model=stored.model,
        config=RolloutConfig.model_validate(LIMITS | {"max_tokens": 40}),
    )


@pytest.fixture(scope="module")
def record(stored: Stored, home: Path, request_of: RolloutRequest) -> StageRecord:
    """Sampled by a process that has ended since."""
    with child(stored, home) as sampler:
        answer = sampler("stage", request=request_of.model_dump(mode="json"), store=stored.uri)
    return StageRecord.model_validate(answer["record"])


@pytest.fixture(scope="module")
def engine(stored: Stored, home: Path, record: StageRecord) -> Iterator[Child]:
    with child(stored, home) as warm:
        yield warm


def rows_of(stored: Stored, record: StageRecord) -> list[dict[str, Any]]:
    return read_shard(stored.store, record.outputs["samples"], schema=SAMPLES).to_pylist()


def edited(stored: Stored, record: StageRecord, rows: list[dict[str, Any]]) -> StageRecord:
    """Puts another record over `rows`, as somebody would who keeps all digests right."""
    key = attempt_key(SCOPE, f"edited-{rows[0]['seed']}", "samples.parquet")
    table = rows_to_table(rows, schema=SAMPLES)
    samples = write_shard(stored.store, table, schema=SAMPLES, key=key)
    return record.model_copy(update={"outputs": {"samples": samples}})


def replay(
    engine: Child, request: RolloutRequest, record: StageRecord, *, how: str
) -> ReplayResult:
    store, scope = engine.stored.store, StepScope(run="copy", step=1)
    if request.scope.prefix in record.outputs["samples"].key:
        put_record(store, scope, record)
    ref = record_ref(scope, record, store=store)
    asked = ReplayRequest(
        scope=scope,
        record=ref,
        prompts=request.prompts,
        policy=request.policy,
        model=request.model,
        how=how,  # type: ignore[arg-type]
    )
    answer = engine("replay", request=asked.model_dump(mode="json"), store=engine.stored.uri)
    store.delete(ref.key)
    return ReplayResult.model_validate(answer)


def test_another_process_regenerates_the_shard_to_the_bit_and_writes_nothing(
    engine: Child, stored: Stored, request_of: RolloutRequest, record: StageRecord
) -> None:
    before = {one.key for one in stored.store.list("")}
    result = replay(engine, request_of, record, how="regenerated")
    assert (result.outcome, result.environment_changes) == ("to the bit", [])
    assert result.forced is None
    assert {one.key for one in stored.store.list("")} == before


def test_teacher_forcing_carries_the_temperature_and_reaches_the_last_token_of_a_full_context(
    engine: Child, stored: Stored, request_of: RolloutRequest, record: StageRecord
) -> None:
    full = [
        row
        for row in rows_of(stored, record)
        if len(row["prompt_token_ids"]) + len(row["completion_token_ids"]) == 96
    ]
    assert full
    result = replay(engine, request_of, record, how="forced")
    assert result.outcome == "within tolerance"
    assert result.forced is not None
    assert result.forced.num_tokens > 300
    assert result.forced.max_abs_diff is not None
    assert result.forced.max_abs_diff < 1e-4


def test_scoring_leaves_no_trace_in_what_is_sampled_next(
    engine: Child, request_of: RolloutRequest, record: StageRecord
) -> None:
    replay(engine, request_of, record, how="forced")
    assert replay(engine, request_of, record, how="regenerated").outcome == "to the bit"


@pytest.mark.parametrize("how", ["regenerated", "forced"])
def test_one_token_that_was_not_sampled_is_found(
    engine: Child, stored: Stored, request_of: RolloutRequest, record: StageRecord, how: str
) -> None:
    rows = rows_of(stored, record)
    tokens = rows[5]["completion_token_ids"]
    tokens[2] = 2 + (tokens[2] + 30) % 60
    result = replay(engine, request_of, edited(stored, record, rows), how=how)
    assert result.outcome == "differs"
    assert f"sample {rows[5]['sample_id']}, " in result.detail


def test_samples_of_another_policy_are_told_apart_by_their_logprobs_alone(
    engine: Child, stored: Stored, request_of: RolloutRequest, record: StageRecord
) -> None:
    # v2 is one small update away from v1.
    other = stored.policies["v2"]
    body = record.request | {"policy": other.digest}
    claimed = request_of.model_copy(update={"policy": other})
    assert claimed.body() == body
    rows = rows_of(stored, record)
    for row in rows:
        row["version_spans"] = [
            {"start": 0, "policy_version": other.version, "policy_digest": other.digest}
        ]
    forged = edited(stored, record, rows).model_copy(
        update={"request": body, "request_digest": claimed.digest()}
    )
    result = replay(engine, claimed, forged, how="forced")
    assert result.outcome == "differs"
    assert result.forced is not None
    assert result.forced.num_differing == 0
    assert result.forced.max_abs_diff is not None
    assert result.forced.max_abs_diff > 3 * result.tolerance


def test_ids_beyond_the_vocabulary_harm_no_engine(
    engine: Child, stored: Stored, request_of: RolloutRequest, record: StageRecord
) -> None:
    rows = rows_of(stored, record)
    rows[0]["completion_token_ids"][0] = 1_000_000
    result = replay(engine, request_of, edited(stored, record, rows), how="forced")
    assert result.outcome == "differs"
    assert replay(engine, request_of, record, how="regenerated").outcome == "to the bit"
