"""What committed steps hold, as tables over every kind of store."""

import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from storage.errors import Corrupt, NotFound
from storage.ledger import read_commit, read_record
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.policy_tables import policies_table
from storage.sample_tables import (
    SAMPLE_ROWS,
    eval_samples_table,
    pool_table,
    prompts_table,
    samples_table,
)
from storage.shard_tables import ShardTable
from storage.store_config import StoreConfig
from storage.tables import (
    evals_table,
    read_all_evals,
    read_runs,
    read_steps,
    runs_table,
    steps_table,
)
from tests.contract.faulty_store import FaultyStore
from tests.contract.sampled_run import SampledRun, Shape

LONG = Shape(filler=10_000)
"""Completions so long that a shard is read by ranges."""


@pytest.fixture
def memory() -> ObjectStore:
    return open_store(StoreConfig(uri=f"memory://{uuid.uuid4().hex}"), writing=True)


def samples_of(store: ObjectStore, run: str = "r") -> ShardTable:
    return samples_table(store, read_steps(store, run))


def test_samples_join_what_sampler_graders_and_algorithm_said(store: ObjectStore, tmp_path: Path):
    SampledRun(store, tmp_path, shape=Shape(gaps=(((2, 1, 0), 0.5),))).write(2)
    rows = samples_of(store).to_table().to_pylist()
    assert len(rows) == 2 * 4 * 2
    chosen = next(row for row in rows if (row["step"], row["group_id"][-1]) == (2, "5"))
    assert (chosen["run"], chosen["shard"], chosen["prompt_id"]) == ("r", 0, "set/1")
    assert (chosen["reward"], chosen["status"], chosen["advantage"]) == (1.0, "graded", 1.0)
    assert (chosen["kept"], chosen["answer"]) == (True, "yes")
    assert chosen["learner_logprobs"] == [-1.0, -0.5, -1.0, -1.0]
    assert rows[-1]["reward_reason"] == "format: wrong"
    assert [row["shard"] for row in rows[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_every_choice_of_columns_gives_the_same_rows(memory: ObjectStore, tmp_path: Path):
    SampledRun(memory, tmp_path, shape=Shape(timed_out=((1, 2, 1),))).write(2)
    table = samples_of(memory)
    whole = table.to_table()
    for name in SAMPLE_ROWS.names:
        assert table.to_table(columns=[name]).column(0).equals(whole[name]), name
    assert table.to_table(columns=["advantage", "step"])["step"].equals(whole["step"])


def test_rows_are_matched_by_sample_and_not_by_position(memory: ObjectStore, tmp_path: Path):
    SampledRun(memory, tmp_path).write(1)
    commit, _ = read_commit(memory, "r", 1)
    table = samples_of(memory)
    ref = next(ref for ref in commit.records if ref.stage == "reward-0000")
    before = table.to_table(columns=["sample_id", "reward"])
    reverse_rows(memory, read_record(memory, ref).outputs["rewards"].key)
    assert samples_of(memory).to_table(columns=["sample_id", "reward"]).equals(before)


def reverse_rows(store: ObjectStore, key: str) -> None:
    rows = pq.read_table(pa.BufferReader(store.get(key)))
    sink = pa.BufferOutputStream()
    pq.write_table(rows.take(list(reversed(range(rows.num_rows)))), sink)
    store.put(key, sink.getvalue().to_pybytes())


def test_a_filter_on_keys_opens_only_those_steps(memory: ObjectStore, tmp_path: Path):
    SampledRun(memory, tmp_path).write(4)
    counting = FaultyStore(memory)
    table = samples_of(counting)
    counting.calls.clear()
    chosen = pc.field("step").isin([2, 3]) & (pc.field("run") == "r")
    found = table.to_table(columns=["reward", "step"], filter=chosen)
    assert found["step"].to_pylist() == [2] * 8 + [3] * 8
    assert {call.split("/")[3] for call in counting.calls} == {"00000002", "00000003"}


def test_columns_that_nobody_asks_for_are_not_read(memory: ObjectStore, tmp_path: Path):
    SampledRun(memory, tmp_path, shape=LONG).write(1)
    counting = BytesRead(memory)
    table = samples_of(counting)
    everything = counting.of(lambda: table.to_table())
    ids = counting.of(lambda: table.to_table(columns=["sample_id", "finish_reason"]))
    assert everything > 500_000
    # One footer (64 KiB, or the whole file) and one small column per shard.
    assert ids < everything / 2
    rewards = counting.of(lambda: table.to_table(columns=["step", "reward"]))
    assert rewards < 20_000


class BytesRead(FaultyStore):
    """A store that counts the bytes it gives out."""

    total = 0

    def get(self, key: str) -> bytes:
        found = super().get(key)
        self.total += len(found)
        return found

    def get_range(self, key: str, start: int, length: int) -> bytes:
        found = super().get_range(key, start, length)
        self.total += len(found)
        return found

    def of(self, call) -> int:
        """Bytes that a second call reads: the records behind it are known by then."""
        call()
        before = self.total
        call()
        return self.total - before


def test_what_no_commit_names_is_never_seen(memory: ObjectStore, tmp_path: Path):
    run = SampledRun(memory, tmp_path).write(1)
    run.write_garbage(1)
    run.write_garbage(2)
    assert samples_of(memory).to_table().num_rows == 8


def test_a_skipped_step_has_prompts_and_no_samples(memory: ObjectStore, tmp_path: Path):
    SampledRun(memory, tmp_path, shape=Shape(skipped=(2,))).write(3)
    steps = read_steps(memory, "r")
    assert set(samples_of(memory).to_table()["step"].to_pylist()) == {1, 3}
    assert (
        prompts_table(memory, steps).to_table()["step"].to_pylist() == [1] * 4 + [2] * 4 + [3] * 4
    )
    told = steps_table(memory, steps).to_pylist()
    assert [row["kind"] for row in told] == ["genesis", "train", "skipped", "train"]
    assert [row["reason"] for row in told] == [None, None, "a bad batch", None]


def test_a_fork_has_rows_of_its_own_only(memory: ObjectStore, tmp_path: Path):
    parent = SampledRun(memory, tmp_path, run="parent").write(2)
    SampledRun(memory, tmp_path, run="child", parent=parent.parent_ref()).write(1)
    parent.write(1)
    assert {
        (row["run"], row["step"]) for row in samples_of(memory, "child").to_table().to_pylist()
    } == {("child", 3)}
    told = {row["run"]: row for row in runs_table(read_runs(memory, None)).to_pylist()}
    assert (told["child"]["parent_run"], told["child"]["parent_step"]) == ("parent", 2)
    assert told["parent"]["parent_run"] is None


def test_policies_say_what_is_kept(memory: ObjectStore, tmp_path: Path):
    SampledRun(memory, tmp_path, shape=Shape(snapshots=(2,))).write(3)
    steps = read_steps(memory, "r")
    memory.delete(steps[1].commit.policy.files[0].key)
    rows = policies_table(memory, steps).to_pylist()
    assert [row["files"] for row in rows] == ["kept", "lost", "kept", "kept"]
    assert [row["has_snapshot"] for row in rows] == [False, False, True, False]
    assert [row["bytes"] for row in rows] == [7, 7, 7, 7]
    assert rows[2]["snapshot_bytes"] == 5


def test_evaluations_have_samples_with_their_prompts(memory: ObjectStore, tmp_path: Path):
    SampledRun(memory, tmp_path).write(1).evaluate(1)
    records = read_runs(memory, ["r"])
    evals = read_all_evals(memory, records)
    assert evals_table(evals).to_pylist()[0]["accuracy"] == 0.5
    rows = eval_samples_table(memory, records, evals).to_table().to_pylist()
    assert [(row["prompt_id"], row["reward"]) for row in rows] == [("set/0", 1.0), ("set/1", 0.0)]


def test_the_pool_has_what_was_never_drawn(memory: ObjectStore, tmp_path: Path):
    SampledRun(memory, tmp_path).write(1)
    rows = pool_table(memory, read_runs(memory, None)).to_table(filter=pc.field("split") == "train")
    assert rows["prompt_id"].to_pylist() == ["set/0", "set/1", "set/2", "set/3"]


def test_a_run_without_steps_has_empty_tables(memory: ObjectStore, tmp_path: Path):
    SampledRun(memory, tmp_path)
    assert read_steps(memory, "r") == []
    assert samples_of(memory).to_table().schema.names == SAMPLE_ROWS.names
    assert steps_table(memory, []).num_rows == policies_table(memory, []).num_rows == 0


def test_a_hole_in_the_chain_is_named(memory: ObjectStore, tmp_path: Path):
    SampledRun(memory, tmp_path).write(3)
    memory.delete("runs/r/steps/00000001/commit.json")
    with pytest.raises(Corrupt, match="step 1"):
        read_steps(memory, "r")


def test_a_changed_record_is_refused_and_a_lost_shard_named(memory: ObjectStore, tmp_path: Path):
    SampledRun(memory, tmp_path).write(1)
    commit, _ = read_commit(memory, "r", 1)
    shard = read_record(memory, commit.records[1]).outputs["samples"].key
    lost = memory.get(shard)
    memory.delete(shard)
    with pytest.raises(NotFound, match=shard):
        samples_of(memory).to_table()
    memory.put(shard, b"PAR1" + lost[:50])
    with pytest.raises(Corrupt, match=shard):
        samples_of(memory).to_table()
    memory.put(commit.records[1].key, b"{}")
    with pytest.raises(Corrupt, match=commit.records[1].key):
        samples_of(memory).to_table()
