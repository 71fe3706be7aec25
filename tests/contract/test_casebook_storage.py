"""Casebook family 5, storage and orchestration: the cases that no other file holds.

A test names its case (`s01`) wherever it lies; the last one here checks that none is missing.
"""

import logging
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.dataset as pads
import pytest

from flows.metrics import step_metrics
from flows.show import summarise
from storage import leases, ledger
from storage.backends import s3
from storage.errors import CommitConflict, CommitUnknown, LeaseHeld, NotFound, StorageError
from storage.experience import read_shard, rows_to_table, write_shard
from storage.layout import StepScope, attempt_key, lease_key, run_prefix
from storage.leases import look
from storage.object_store import ObjectStore
from storage.objects import fetch_file, upload_file
from storage.opening import open_store, sweep
from storage.records import StageRecord, StepCommit
from storage.schemas import REWARDS, SAMPLES
from storage.store_config import StoreConfig
from tests.contract import records
from tests.contract.faulty_store import FaultyStore
from tests.contract.test_store_leases import HOLD_UNTIL_KILLED
from tests.contract.test_store_ledger import make_chain
from tests.contract.test_store_opening import open_uploads
from tests.unit.reward.test_reward_stage import EXACT_AND_FORMAT, Setup

CASES = {
    *("01", "02", "05", "07", "08", "09", "10", "13", "14", "15", "16", "17"),
    *("19", "20", "22", "24", "26", "27", "29", "31", "32", "33"),
}
TESTS = Path(__file__).parents[1]
MIB = 1 << 20


def head_step(store: ObjectStore) -> int:
    found = ledger.head(store, "r")
    assert found is not None
    return found[0].step


def put_weights(store: ObjectStore, step: int) -> None:
    """Half of what a step writes: weights, and nothing that names them."""
    store.put(attempt_key(StepScope(run="r", step=step), "a", "policy/model.safetensors"), b"half")


def test_s01_an_upload_broken_in_the_middle_is_no_object_and_the_next_start_drops_it(
    s3_config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 * MIB)
    (tmp_path / "weights").write_bytes(bytes(25 * MIB))
    store = open_store(s3_config, writing=True)
    assert isinstance(store, s3.S3Store)
    make_chain(store, 2)
    send = store._bulk.upload_part

    def die_after_one(**options: Any) -> Any:
        if options["PartNumber"] > 1:
            raise KeyboardInterrupt
        return send(**options)

    monkeypatch.setattr(store._bulk, "upload_part", die_after_one)
    # The dead abort nothing.
    monkeypatch.setattr(store, "_abort", lambda key, upload_id: None)
    key = attempt_key(StepScope(run="r", step=2), "a", "policy/model.safetensors")
    with pytest.raises(KeyboardInterrupt):
        store.upload(key, tmp_path / "weights")
    reader = s3.open_s3(s3_config)
    with pytest.raises(NotFound):
        reader.size(key)
    assert head_step(reader) == 1
    assert len(open_uploads(reader)) == 1
    # What every controller does once it holds the run's lease.
    sweep(open_store(s3_config, writing=True), run_prefix("r"), older_than_s=0)
    assert open_uploads(reader) == []


def test_s02_a_step_with_weights_only_is_not_where_a_resume_begins_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store = open_store(StoreConfig(uri=str(tmp_path)), writing=True)
    make_chain(store, 21)
    put_weights(store, 30)
    assert head_step(store) == 20
    assert "Step 30 of run r was begun and is not committed" in caplog.text


def test_s05_a_pointer_to_a_step_that_is_not_whole_misleads_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store = open_store(StoreConfig(uri=str(tmp_path)), writing=True)
    make_chain(store, 41)
    put_weights(store, 50)
    for name in ("latest", "steps/latest", "steps/00000050/latest"):
        store.put(f"runs/r/{name}", b"50")
    assert head_step(store) == 40
    assert "Step 50 of run r was begun and is not committed" in caplog.text
    assert "runs/r/steps/latest belongs to no step" in caplog.text


def test_s09_twelve_mebibytes_in_three_parts_are_checked_by_their_own_sha256(
    make_config: Callable[[str], StoreConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 * MIB)
    (tmp_path / "file").write_bytes(os.urandom(12 * MIB))
    store = open_store(make_config("moto"), writing=True)
    ref = upload_file(store, "a/file", tmp_path / "file")
    payload, etag = store.get_with_etag("a/file")
    assert etag.strip('"').endswith("-3")
    assert payload == (tmp_path / "file").read_bytes()
    found = fetch_file(store, ref, cache=tmp_path / "cache")
    assert found.read_bytes() == payload
    # The etag names what is there, whatever it is made of.
    changed = store.put_if_match("a/file", b"other", etag)
    with pytest.raises(CommitConflict):
        store.put_if_match("a/file", b"third", etag)
    assert store.get_with_etag("a/file") == (b"other", changed)


def test_s13_steps_go_by_their_numbers_and_not_by_when_they_were_written(tmp_path: Path) -> None:
    store = open_store(StoreConfig(uri=str(tmp_path)), writing=True)
    make_chain(store, 12)
    for path in (tmp_path / "runs/r/steps").glob("*/commit.json"):
        newer = 12 - int(path.parent.name)
        os.utime(path, (newer * 1000, newer * 1000))
    assert head_step(store) == 11
    assert [commit.step for commit, _ in ledger.commits(store, "r")] == list(range(12))


def test_s15_a_folder_with_a_shard_of_missing_values_only_can_be_read(tmp_path: Path) -> None:
    store = open_store(StoreConfig(uri=str(tmp_path)), writing=True)
    shards = {
        "a": [reward_row("1", None), reward_row("2", None)],
        "b": [reward_row("3", 1.0), reward_row("4", 0.5)],
    }
    for name, rows in shards.items():
        write_shard(
            store, rows_to_table(rows, schema=REWARDS), schema=REWARDS, key=f"shards/{name}"
        )
    folder = pads.dataset(tmp_path / "shards", format="parquet")
    assert folder.schema.field("reward").type == "double"
    assert folder.to_table()["reward"].to_pylist() == [None, None, 1.0, 0.5]


def reward_row(sample_id: str, reward: float | None) -> dict[str, Any]:
    status = "grader_error" if reward is None else "graded"
    return {
        "sample_id": sample_id,
        "reward": reward,
        "status": status,
        "reason": None,
        "parts": [],
    }


@pytest.fixture
def grading(tmp_path: Path) -> Iterator[Setup]:
    opened = Setup(tmp_path)
    yield opened
    opened.grading.close()


def test_s17_a_shard_without_rows_is_graded_counted_and_divided_by_nothing(grading: Setup) -> None:
    samples = write_shard(grading.store, SAMPLES.empty_table(), schema=SAMPLES, key="s")
    _, prompts = grading.write(["4"], [])
    record = grading.run(grading.request((samples, prompts), EXACT_AND_FORMAT)).record
    assert record.outputs["rewards"].rows == 0
    assert grading.rows(grading.run(grading.request((samples, prompts), EXACT_AND_FORMAT))) == []
    sampled = records.stage_record(outputs={"samples": samples})
    metrics = step_metrics([sampled], [record], records.stage_record("train", {"kind": "t"}), {})
    assert metrics["num_samples"] == metrics["num_graded"] == 0.0
    assert metrics["reward_mean"] is None
    assert metrics["truncated_share"] is None


SCOPE = StepScope(run="r", step=1)


def sample_shard_three(store: ObjectStore) -> StageRecord:
    """A rollout shard as its stage stores it: look, data under a new attempt, record."""
    body = {"shard": 3, "seed": "1"}
    digest = records.stage_record(body=body).request_digest
    found = ledger.find_record(store, SCOPE, stage="rollout-0003", request_digest=digest)
    if found is not None:
        return found
    attempt = os.urandom(8).hex()
    rows = [reward_row(f"s{index}", 1.0) for index in range(4)]
    key = attempt_key(SCOPE, attempt, "rollout-0003.parquet")
    shard = write_shard(store, rows_to_table(rows, schema=REWARDS), schema=REWARDS, key=key)
    record = records.stage_record(body=body, attempt=attempt, outputs={"rewards": shard})
    return ledger.put_record(store, SCOPE, record)[0]


def test_s24_a_retry_after_the_rows_were_written_doubles_none(store: ObjectStore) -> None:
    # Calls: find, put the shard, put the record. The shard stands when the third one fails.
    for when in ("before", "after"):
        with pytest.raises(StorageError):
            sample_shard_three(FaultyStore(store, fail_at=3, when=when))
    standing = sample_shard_three(store)
    assert sample_shard_three(store) == standing
    stages = list(store.list(f"{SCOPE.prefix}/stages/rollout-0003/"))
    assert len(stages) == 1
    rows = read_shard(store, standing.outputs["rewards"], schema=REWARDS)["sample_id"].to_pylist()
    assert Counter(rows) == {"s0": 1, "s1": 1, "s2": 1, "s3": 1}


def commit_next(store: ObjectStore, step: int) -> StepCommit:
    previous = ledger.read_commit(store, "r", step - 1)[1]
    return ledger.put_commit(store, records.commit(step, previous))[0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_s26_killed_between_weights_and_manifest_the_version_before_is_served(
    store: ObjectStore, when: Any
) -> None:
    make_chain(store, 5)
    put_weights(store, 5)
    # Calls: read the commit before (twice), put.
    with pytest.raises(CommitUnknown):
        commit_next(FaultyStore(store, fail_at=3, when=when), 5)
    assert head_step(store) == (4 if when == "before" else 5)
    assert commit_next(store, 5).policy_version == 5
    assert head_step(store) == 5


@contextmanager
def holding(config: StoreConfig, ttl_s: float) -> Iterator["subprocess.Popen[str]"]:
    """A controller of run `r` in another process."""
    command = [sys.executable, "-c", HOLD_UNTIL_KILLED, config.model_dump_json(), str(ttl_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_s27_a_second_run_of_the_same_training_is_refused_and_writes_no_commit(
    make_config: Callable[[str], StoreConfig],
) -> None:
    config = make_config("local")
    store = open_store(config, writing=True)
    previous = make_chain(store, 2)[-1]
    with holding(config, ttl_s=3) as first:
        with pytest.raises(LeaseHeld, match=f"process {first.pid} on"):
            leases.hold(store, "r", "controller")
        assert summary_state(store, config) == "running"
    # Both past the lease: the put decides, and the loser adopts what stands.
    mine, theirs = (records.commit(2, previous, attempt=name) for name in ("mine", "theirs"))
    assert ledger.put_commit(store, mine)[2]
    assert ledger.put_commit(store, theirs)[0] == mine


def summary_state(store: ObjectStore, config: StoreConfig) -> str:
    return summarise(store, "r", store_config=config).state


def test_s31_a_killed_worker_frees_its_lease_and_is_shown_as_crashed(
    make_config: Callable[[str], StoreConfig],
) -> None:
    config = make_config("local")
    store = open_store(config, writing=True)
    make_chain(store, 2)
    assert summary_state(store, config) == "stopped"
    with holding(config, ttl_s=60) as worker:
        os.kill(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        assert look(store, "r", "controller").kind == "dead"
        assert summary_state(store, config) == "crashed"
        with leases.hold(store, "r", "controller"):
            assert summary_state(store, config) == "running"
    assert summary_state(store, config) == "stopped"


def test_s32_what_is_said_of_a_complete_run_later_changes_nothing(
    make_config: Callable[[str], StoreConfig],
) -> None:
    config = make_config("local")
    store = open_store(config, writing=True)
    # The run of these records asks for 3 steps.
    make_chain(store, 4)
    before = ledger.read_commit(store, "r", 3)
    with holding(config, ttl_s=60) as controller:
        os.kill(controller.pid, signal.SIGKILL)
        os.waitid(os.P_PID, controller.pid, os.WEXITED | os.WNOWAIT)
    assert look(store, "r", "controller").kind == "dead"
    assert summary_state(store, config) == "complete"
    late = leases.LeaseState.from_bytes(store.get(lease_key("r", "controller")))
    store.put(lease_key("r", "controller"), late.model_copy(update={"beat": 99}).to_bytes())
    assert summary_state(store, config) == "complete"
    assert ledger.read_commit(store, "r", 3) == before


def test_every_case_of_the_family_has_a_test() -> None:
    named = {
        case
        for path in TESTS.rglob("test_*.py")
        for test in re.findall(r"def test_\w+", path.read_text())
        for case in re.findall(r"_s(\d\d)(?=_|$)", test)
    }
    assert sorted(CASES - named) == []
