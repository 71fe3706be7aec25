"""The rollout stage: from rows of a prompts shard to rows of a samples shard."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from storage.errors import StorageError
from storage.experience import read_shard
from storage.ledger import find_record
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import SamplingPolicy
from storage.schemas import SAMPLES
from storage.store_config import StoreConfig
from tasks.errors import Permanent
from tasks.rollout import stage
from tasks.rollout.contract import RolloutResult
from tasks.rollout.shard import group_seed
from tasks.workspace import Workspace
from tests.contract.faulty_store import fault_points
from tests.unit.rollout.seeded_engine import SeededEngine
from tests.unit.rollout.small_shard import CONFIG, LENGTHS, SCOPE, policy_in, request_in


def rows_of(store: ObjectStore, result: RolloutResult) -> list[dict[str, Any]]:
    samples = result.record.outputs["samples"]
    return read_shard(store, samples, schema=SAMPLES).to_pylist()


def test_samples_stand_under_their_own_prompt_however_they_arrive(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    request = request_in(store, tmp_path)
    engine = SeededEngine(CONFIG, arrival=-1)
    rows = rows_of(store, stage.run(request, store, engine, workspace=workspace))
    assert [row["group_id"] for row in rows] == [
        group for group in ("g0", "g1", "g3", "g4", "g5") for _ in range(2)
    ]
    for row in rows:
        number = int(row["group_id"][1:])
        assert row["prompt_token_ids"] == [20 + number] * LENGTHS[number]
        assert row["sample_id"] == f"{row['group_id']}-{row['sample_index']}"
        assert row["seed"] == 1000 + 2 * number + row["sample_index"]


def test_an_over_long_prompt_is_left_out_by_name_and_shifts_no_other(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    request = request_in(store, tmp_path)
    record = stage.run(request, store, SeededEngine(CONFIG), workspace=workspace).record
    assert record.notes == [
        "prompt p2 (group g2) was not sampled: it has 12 tokens, expected 1 to 11"
    ]
    assert record.metrics["num_prompts_without_room"] == 1
    assert record.metrics["num_samples"] == 10


def test_max_tokens_of_a_row_is_what_the_context_left(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    request = request_in(store, tmp_path)
    rows = rows_of(store, stage.run(request, store, SeededEngine(CONFIG), workspace=workspace))
    limits = {row["group_id"]: row["max_tokens"] for row in rows}
    assert limits == {"g0": 6, "g1": 6, "g3": 6, "g4": 2, "g5": 6}
    assert all(len(row["completion_token_ids"]) <= row["max_tokens"] for row in rows)


def test_truncation_is_counted_and_a_stop_token_is_named(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    request = request_in(store, tmp_path)
    result = stage.run(request, store, SeededEngine(CONFIG), workspace=workspace)
    rows = rows_of(store, result)
    truncated = [row for row in rows if row["finish_reason"] == "length"]
    assert result.record.metrics["truncated_share"] == len(truncated) / len(rows)
    assert 0 < len(truncated) < len(rows)
    assert {row["stop_token_id"] for row in truncated} == {None}
    stopped = [row for row in rows if row["finish_reason"] == "stop"]
    assert all(row["completion_token_ids"][-1] == row["stop_token_id"] == 1 for row in stopped)


def test_seeds_of_all_groups_of_all_shards_are_apart() -> None:
    seeds = [
        group_seed(9, row=row, group_size=3) + child for row in range(50) for child in range(3)
    ]
    assert len(set(seeds)) == 150


def test_a_store_that_fails_anywhere_leaves_one_record_with_the_same_samples(
    workspace: Workspace, tmp_path: Path
) -> None:
    made = iter(range(1000))

    def make_store() -> ObjectStore:
        return open_store(StoreConfig(uri=str(tmp_path / f"store{next(made)}")), writing=True)

    def sample(store: ObjectStore) -> RolloutResult:
        return stage.run(request, store, SeededEngine(CONFIG), workspace=workspace)

    healthy = make_store()
    request = request_in(healthy, tmp_path)
    expected = sample(healthy).record.outputs["samples"].sha256

    def prepared() -> ObjectStore:
        store = make_store()
        assert request_in(store, tmp_path) == request
        return store

    num_faults = 0
    for faulty in fault_points(sample, prepared):
        num_faults += 1
        with suppress(StorageError):
            sample(faulty)
        result = sample(faulty)
        assert result.record.outputs["samples"].sha256 == expected
        standing = find_record(faulty, SCOPE, stage="rollout-0001", request_digest=request.digest())
        assert standing == result.record
    assert num_faults >= 8


def test_who_loses_the_race_returns_the_winners_record(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    request = request_in(store, tmp_path)

    class Overtaken(SeededEngine):
        """Another process finishes the request while this one samples."""

        def submit(self, groups: Any, *, sampling: SamplingPolicy) -> Any:
            self.winner = stage.run(request, store, SeededEngine(CONFIG), workspace=workspace)
            return super().submit(groups, sampling=sampling)

    engine = Overtaken(CONFIG)
    result = stage.run(request, store, engine, workspace=workspace)
    assert result.reused
    assert result.record == engine.winner.record


def test_a_warm_engine_loads_only_another_digest_and_names_the_version_asked_for(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    engine = SeededEngine(CONFIG)
    first = request_in(store, tmp_path)
    same_weights = policy_in(store, tmp_path, value=1, version=6)
    others = policy_in(store, tmp_path, value=2, version=7)
    proofs = [
        stage.run(
            first.model_copy(update={"policy": policy, "shard": shard}),
            store,
            engine,
            workspace=workspace,
        ).record.proof
        for shard, policy in enumerate([first.policy, same_weights, others])
    ]
    assert engine.loads == [5, 7]
    assert [proof and proof.policy_version for proof in proofs] == [5, 6, 7]


def test_no_rows_are_an_empty_shard(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    request = request_in(store, tmp_path, start=2, stop=2)
    record = stage.run(request, store, SeededEngine(CONFIG), workspace=workspace).record
    assert record.outputs["samples"].rows == 0
    assert record.metrics["truncated_share"] is None


def test_rows_that_the_prompts_lack_are_an_error(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    request = request_in(store, tmp_path, stop=7)
    with pytest.raises(ValueError, match=r"asks for rows 0 to 7 .* which has 6"):
        stage.run(request, store, SeededEngine(CONFIG), workspace=workspace)


def test_an_engine_with_other_limits_is_refused(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    request = request_in(store, tmp_path)
    other = SeededEngine(CONFIG.model_copy(update={"threads": 4}))
    with pytest.raises(Permanent, match=r"threads 4 \(asked: 1\)"):
        stage.run(request, store, other, workspace=workspace)


def test_a_group_that_comes_back_twice_is_an_error(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    class Doubling(SeededEngine):
        def submit(self, groups: Any, *, sampling: SamplingPolicy) -> Any:
            return super().submit([*groups, groups[0]], sampling=sampling)

    with pytest.raises(Permanent, match=r"returned 6 groups \(5 different\) for 5 asked"):
        stage.run(request_in(store, tmp_path), store, Doubling(CONFIG), workspace=workspace)


@pytest.mark.parametrize("module", ["contract", "stage", "engine", "proof"])
def test_importing_loads_no_engine(module: str) -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'prefect'}"
    script = f"import sys, tasks.rollout.{module}; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.strip() == ""
