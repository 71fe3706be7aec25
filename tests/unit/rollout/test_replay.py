"""A committed rollout shard run again: what holds is said, and what was changed is found."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from storage.errors import NotFound
from storage.experience import read_shard, rows_to_table, write_shard
from storage.layout import attempt_key
from storage.ledger import put_record, record_ref
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import StageRecord
from storage.schemas import SAMPLES
from storage.store_config import StoreConfig
from tasks.errors import Permanent
from tasks.rollout import stage
from tasks.rollout.contract import ReplayRequest, ReplayResult, RolloutRequest, requested_config
from tasks.workspace import Workspace
from tests.unit.rollout.seeded_engine import SeededEngine
from tests.unit.rollout.small_shard import CONFIG, SAMPLING, SCOPE, policy_in, request_in

Edit = Callable[[list[dict[str, Any]]], None]


class CpuEngine(SeededEngine):
    """Promises the same tokens again, as the real one does on a CPU."""

    def environment(self) -> dict[str, str]:
        return {"device": "cpu"}


class OtherMachine(CpuEngine):
    """Draws other tokens from the same seeds, and has the same logprobs."""

    def environment(self) -> dict[str, str]:
        return {"device": "cpu", "instructions": "others"}

    def submit(self, groups: Any, *, sampling: Any) -> Any:
        moved = [type(each)(each.group_id, each.prompt_token_ids, each.seed + 1) for each in groups]
        finished = super().submit(moved, sampling=sampling)
        pairs = zip(groups, finished, strict=True)
        return iter([type(one)(group, one.completions) for group, one in pairs])


@dataclass(frozen=True)
class Committed:
    """A stored shard, and what it takes to run it again."""

    store: ObjectStore
    workspace: Workspace
    request: RolloutRequest
    record: StageRecord

    def rows(self) -> list[dict[str, Any]]:
        return read_shard(self.store, self.record.outputs["samples"], schema=SAMPLES).to_pylist()

    def edited(self, edit: Edit) -> "Committed":
        """The same record over samples that somebody changed, digests and all."""
        rows = self.rows()
        edit(rows)
        key = attempt_key(SCOPE, "edited", "samples.parquet")
        table = rows_to_table(rows, schema=SAMPLES)
        samples = write_shard(self.store, table, schema=SAMPLES, key=key)
        return self.with_record(outputs={"samples": samples})

    def with_record(self, **changes: Any) -> "Committed":
        record = self.record.model_copy(update=changes)
        key = self.ref().key
        self.store.delete(key)
        put_record(self.store, SCOPE, record)
        return Committed(self.store, self.workspace, self.request, record)

    def ref(self) -> Any:
        return record_ref(SCOPE, self.record, store=self.store)

    def replay_request(self, **changes: Any) -> ReplayRequest:
        fields: dict[str, Any] = {
            "scope": SCOPE,
            "record": self.ref(),
            "prompts": self.request.prompts,
            "policy": self.request.policy,
            "model": self.request.model,
        }
        return ReplayRequest(**(fields | changes))

    def replayed(self, engine: SeededEngine | None = None, **changes: Any) -> ReplayResult:
        engine = engine or CpuEngine(CONFIG)
        request = self.replay_request(**changes)
        result = stage.run(request, self.store, engine, workspace=self.workspace)
        assert isinstance(result, ReplayResult)
        return result


def commit(store: ObjectStore, workspace: Workspace, directory: Path, **changes: Any) -> Committed:
    request = request_in(store, directory, **changes)
    result = stage.run(request, store, CpuEngine(CONFIG), workspace=workspace)
    return Committed(store, workspace, request, result.record)


@pytest.fixture
def committed(store: ObjectStore, workspace: Workspace, tmp_path: Path) -> Committed:
    return commit(store, workspace, tmp_path)


def test_a_shard_is_regenerated_to_the_bit_and_nothing_is_written(
    committed: Committed, tmp_path: Path
) -> None:
    before = {one.key: committed.store.get(one.key) for one in committed.store.list("")}
    reader = open_store(StoreConfig(uri=str(tmp_path / "store")), writing=False)
    engine = CpuEngine(CONFIG)
    result = stage.run(committed.replay_request(), reader, engine, workspace=committed.workspace)
    assert isinstance(result, ReplayResult)
    assert (result.outcome, result.environment_changes) == ("to the bit", [])
    assert result.detail.startswith("10 samples, ")
    assert engine.scored == 0
    assert {one.key: committed.store.get(one.key) for one in committed.store.list("")} == before


def test_a_changed_token_is_found_by_sample_and_position(committed: Committed) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        tokens = rows[3]["completion_token_ids"]
        tokens[1] = 7 - tokens[1]

    was = committed.rows()[3]
    result = committed.edited(edit).replayed()
    assert result.outcome == "differs"
    assert result.regenerated is not None
    assert result.regenerated.num_differing == 1
    where = result.regenerated.where
    assert where is not None
    assert (where.sample_id, where.column, where.position) == (
        was["sample_id"],
        "completion_token_ids",
        1,
    )
    right = was["completion_token_ids"][1]
    assert (where.expected, where.found) == (str(7 - right), str(right))
    assert f"sample {was['sample_id']}, completion_token_ids[1]: expected" in result.detail


@pytest.mark.parametrize("how", ["regenerated", "forced"])
def test_a_changed_logprob_is_found_however_it_is_looked_for(
    committed: Committed, how: str
) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        rows[9]["rollout_logprobs"][0] -= 0.25

    result = committed.edited(edit).replayed(how=how)
    assert result.outcome == "differs"
    comparison = result.regenerated or result.forced
    assert comparison is not None
    assert comparison.max_abs_diff == pytest.approx(0.25)
    assert comparison.where is not None
    assert (comparison.where.sample_id, comparison.where.position) == ("g5-1", 0)


def test_logprobs_that_rounding_moved_are_within_tolerance_by_their_figure(
    committed: Committed,
) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        rows[0]["rollout_logprobs"][0] += 2.0**-12

    result = committed.edited(edit).replayed()
    assert result.outcome == "within tolerance"
    assert result.regenerated is not None
    assert result.regenerated.max_abs_diff == 2.0**-12
    assert "logprobs differ by at most 0.000244" in result.detail
    assert result.tolerance == CONFIG.probe_tolerance


CHANGES: dict[str, Any] = {
    "prompt_token_ids": [3],
    "finish_reason": "stop by hand",
    "stop_token_id": 6,
    "seed": 1,
    "temperature": 0.9,
    "max_tokens": 99,
    "group_id": "g4",
    "completion_mask": [],
    "version_spans": [{"start": 0, "policy_version": 4, "policy_digest": "d"}],
}


@pytest.mark.parametrize("how", ["regenerated", "forced"])
@pytest.mark.parametrize("column", CHANGES)
def test_a_change_in_any_other_column_is_found_even_on_another_machine(
    committed: Committed, column: str, how: str
) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        rows[0][column] = CHANGES[column]

    edited = committed.edited(edit)
    assert edited.replayed(how=how).outcome == "differs"
    assert edited.replayed(OtherMachine(CONFIG), how=how).outcome == "differs"


@pytest.mark.parametrize("how", ["regenerated", "forced"])
def test_samples_that_were_added_or_left_out_are_named(committed: Committed, how: str) -> None:
    result = committed.edited(lambda rows: rows.pop(4) and None).replayed(how=how)
    assert result.outcome == "differs"
    assert "sample g3-1, sample_id: expected g3-1, found g3-0" in result.detail


def test_teacher_forcing_alone_tells_what_was_cut_off_and_what_follows_a_stop(
    committed: Committed,
) -> None:
    def cut(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["finish_reason"] == "length")
        for column in ("completion_token_ids", "rollout_logprobs", "completion_mask"):
            row[column].pop()

    def go_on(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["finish_reason"] == "stop")
        row["completion_token_ids"].append(2)
        row["rollout_logprobs"].append(-1.0)
        row["completion_mask"].append(True)

    shortened = committed.edited(cut).replayed(how="forced")
    assert "finish_reason: expected length, found" in shortened.detail
    lengthened = committed.edited(go_on).replayed(how="forced")
    assert "completion_token_ids" in lengthened.detail
    assert {shortened.outcome, lengthened.outcome} == {"differs"}


def test_other_tokens_on_another_machine_are_settled_by_the_policys_own_logprobs(
    committed: Committed,
) -> None:
    result = committed.replayed(OtherMachine(CONFIG))
    assert result.outcome == "within tolerance"
    assert result.detail.startswith("teacher-forced, 10 samples")
    assert result.environment_changes == ["instructions: none -> others"]
    assert result.regenerated is not None
    assert result.regenerated.num_differing > 0


def test_what_another_machine_cannot_confirm_is_not_comparable(committed: Committed) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        rows[0]["rollout_logprobs"][0] -= 0.25

    result = committed.edited(edit).replayed(OtherMachine(CONFIG))
    assert result.outcome == "not comparable"
    assert "sample g0-0, rollout_logprobs[0]" in result.detail


def test_a_token_outside_the_vocabulary_differs_by_more_than_any_tolerance(
    committed: Committed,
) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        rows[0]["completion_token_ids"][0] = 5_000

    result = committed.edited(edit).replayed(how="forced")
    assert result.outcome == "differs"
    assert "rollout_logprobs[0]" in result.detail
    assert "found -inf" in result.detail


def test_a_gpu_does_not_promise_the_same_tokens(committed: Committed) -> None:
    class Gpu(OtherMachine):
        def environment(self) -> dict[str, str]:
            return {"device": "some GPU"}

    on_gpu = committed.with_record(
        environment=committed.record.environment | {"device": "some GPU"}
    )
    result = on_gpu.replayed(Gpu(CONFIG))
    assert (result.outcome, result.environment_changes) == ("within tolerance", [])


def test_a_cut_distribution_is_not_teacher_forced(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    narrow = SAMPLING.model_copy(update={"top_p": 0.9})
    committed = commit(store, workspace, tmp_path, sampling=narrow)
    assert committed.replayed().outcome == "to the bit"
    assert committed.replayed(OtherMachine(CONFIG)).outcome == "not comparable"
    forced = committed.replayed(how="forced")
    assert forced.outcome == "not checked"
    assert "top_p 0.9 and top_k 0 cut the distribution" in forced.detail


def test_a_policy_whose_files_were_given_up_is_not_checked(committed: Committed) -> None:
    [weights] = committed.request.policy.files
    committed.store.delete(weights.key)
    cached = committed.workspace.cache / weights.sha256[:2] / weights.sha256
    kept = cached.read_bytes()
    cached.unlink()
    result = committed.replayed()
    assert result.outcome == "not checked"
    assert result.detail.startswith("files of policy 5 were given up or lost: ")
    cached.write_bytes(kept)
    assert committed.replayed().outcome == "to the bit"


def test_another_policy_than_the_records_is_refused(committed: Committed, tmp_path: Path) -> None:
    other = policy_in(committed.store, tmp_path, value=2, version=6)
    with pytest.raises(ValueError, match=f"policy {other.digest} .record: "):
        committed.replayed(policy=other)


def test_an_engine_with_other_limits_does_not_replay(committed: Committed) -> None:
    other = CpuEngine(CONFIG.model_copy(update={"threads": 4}))
    with pytest.raises(Permanent, match=r"threads 4 \(asked: 1\)"):
        committed.replayed(other)


def test_samples_that_are_gone_are_an_error(committed: Committed) -> None:
    committed.store.delete(committed.record.outputs["samples"].key)
    with pytest.raises(NotFound):
        committed.replayed()


def test_the_config_of_a_request_is_what_its_engine_was_started_with(
    committed: Committed,
) -> None:
    assert requested_config(committed.record.request).request_fields() == CONFIG.request_fields()


def test_a_redone_shard_replays_as_any_other(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    redone = commit(store, workspace, tmp_path, redo=2)
    assert redone.record.request["redo"] == 2
    assert redone.replayed().outcome == "to the bit"


def test_no_samples_at_all_are_equal(
    store: ObjectStore, workspace: Workspace, tmp_path: Path
) -> None:
    empty = commit(store, workspace, tmp_path, start=2, stop=2)
    assert empty.replayed().outcome == "to the bit"
    assert empty.replayed(how="forced").outcome == "within tolerance"
