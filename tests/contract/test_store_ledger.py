"""Runs, plans, records and commits: what is put once, who wins, and what a crash leaves."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage import ledger
from storage.errors import AlreadyExists, CommitConflict, Corrupt, NotFound, StorageError
from storage.layout import StepScope, attempt_key, commit_key, record_key, run_key
from storage.object_store import Listed, ObjectStore
from storage.objects import put_object, read_object
from storage.records import EvalRecord, StageRecord, StepCommit, sha256_hex
from tests.contract import records
from tests.contract.faulty_store import FaultyStore, fault_points

SCOPE = StepScope(run="r", step=1)


def make_chain(store: ObjectStore, num_commits: int) -> list[str]:
    """Commits steps 0 .. num_commits - 1; returns their digests."""
    previous = ledger.create_run(store, records.run_record())
    digests: list[str] = []
    for step in range(num_commits):
        _, previous, ours = ledger.put_commit(store, records.commit(step, previous))
        assert ours
        digests.append(previous)
    return digests


def test_a_run_is_created_once(store: ObjectStore) -> None:
    digest = ledger.create_run(store, records.run_record())
    assert ledger.create_run(store, records.run_record()) == digest
    with pytest.raises(AlreadyExists, match="rollbook resume r"):
        ledger.create_run(store, records.run_record(launch_id="another"))
    assert ledger.read_run(store, "r") == (records.run_record(), digest)
    with pytest.raises(NotFound):
        ledger.read_run(store, "other")


def test_a_name_that_cannot_be_a_run_is_refused(store: ObjectStore) -> None:
    with pytest.raises(ValueError, match="not usable"):
        ledger.create_run(store, records.run_record(run="../r"))


def test_runs_are_listed_whatever_their_names(store: ObjectStore) -> None:
    names = ["a", "a-b", "a.b", "a0", "b"]
    for name in names:
        ledger.create_run(store, records.run_record(run=name))
    store.put("runs/half/steps/00000000/attempts/x/data", b"x")
    assert ledger.list_runs(store) == names


@pytest.mark.parametrize("num_commits", [0, 1, 2, 3, 4, 7, 8, 12])
def test_the_head_is_the_newest_commit(store: ObjectStore, num_commits: int) -> None:
    digests = make_chain(store, num_commits)
    found = ledger.head(store, "r")
    if num_commits == 0:
        assert found is None
    else:
        assert found is not None
        assert (found[0].step, found[1]) == (num_commits - 1, digests[-1])
    assert [digest for _, digest in ledger.commits(store, "r")] == digests


def test_s07_the_head_goes_by_number_past_a_thousand_objects(store: ObjectStore) -> None:
    make_chain(store, 11)
    keys = [f"runs/r/steps/{step:08d}/attempts/a/{n:03d}" for step in (9, 10) for n in range(510)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b"x"), keys))
    found = ledger.head(store, "r")
    assert found is not None
    assert found[0].step == 10


def test_a_half_written_step_is_not_the_head_and_is_named(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    make_chain(store, 2)
    scope = StepScope(run="r", step=2)
    store.put(attempt_key(scope, "a", "policy/model.safetensors"), b"weights")
    ledger.put_record(store, scope, records.stage_record())
    found = ledger.head(store, "r")
    assert found is not None
    assert found[0].step == 1
    assert "Step 2 of run r was begun and is not committed" in caplog.text


@pytest.mark.parametrize("num_meanwhile", [1, 2, 5])
def test_steps_that_are_committed_while_the_head_is_looked_for_are_no_break(
    store: ObjectStore, num_meanwhile: int
) -> None:
    previous = make_chain(store, 3)[-1]

    class Busy(FaultyStore):
        """A controller commits between the search and the listing that follows it."""

        def list(self, prefix: str, *, start_after: str = "") -> Iterator[Listed]:
            nonlocal previous
            for step in range(3, 3 + num_meanwhile if previous == last else 3):
                _, previous, _ = ledger.put_commit(store, records.commit(step, previous))
            return super().list(prefix, start_after=start_after)

    last = previous
    found = ledger.head(Busy(store), "r")
    assert found is not None
    assert (found[0].step, found[1]) == (2 + num_meanwhile, previous)


def test_a_commit_missing_below_another_is_named(store: ObjectStore) -> None:
    make_chain(store, 12)
    store.delete(commit_key("r", 5))
    # The search for the head does not come by step 5; the walk along the chain does.
    with pytest.raises(Corrupt, match="breaks at step 5"):
        list(ledger.commits(store, "r"))
    store.delete(commit_key("r", 7))
    with pytest.raises(Corrupt, match="but the commit of step"):
        ledger.head(store, "r")


def test_a_step_is_committed_once_and_the_loser_adopts(store: ObjectStore) -> None:
    previous = ledger.create_run(store, records.run_record())
    first, digest, ours = ledger.put_commit(store, records.commit(0, previous, attempt="7f3a"))
    assert ours
    second, found, ours = ledger.put_commit(store, records.commit(0, previous, attempt="b210"))
    assert (second, found, ours) == (first, digest, False)
    assert digest == sha256_hex(store.get(commit_key("r", 0)))


def test_racing_commits_keep_one_history(store: ObjectStore) -> None:
    previous = ledger.create_run(store, records.run_record())
    for step in range(3):
        with ThreadPoolExecutor(6) as pool:
            attempts = [records.commit(step, previous, attempt=f"a{n}") for n in range(6)]
            outcomes = list(pool.map(lambda item: ledger.put_commit(store, item), attempts))
        assert [ours for _, _, ours in outcomes].count(True) == 1
        assert len({digest for _, digest, _ in outcomes}) == 1
        previous = outcomes[0][1]
    assert len(list(ledger.commits(store, "r"))) == 3


def test_a_commit_on_another_past_is_a_conflict(store: ObjectStore) -> None:
    make_chain(store, 1)
    with pytest.raises(CommitConflict, match="continue from there"):
        ledger.put_commit(store, records.commit(1, "0" * 64))
    with pytest.raises(NotFound):
        ledger.put_commit(store, records.commit(2, "0" * 64))


def test_a_commit_that_does_not_parse_is_told_in_one_line_by_field(store: ObjectStore) -> None:
    make_chain(store, 1)
    payload = store.get(commit_key("r", 0))
    store.put(commit_key("r", 0), payload.replace(b'"step":0', b'"step":"none"'))
    with pytest.raises(Corrupt, match=r"commit\.json is not a StepCommit: step: Input") as caught:
        ledger.head(store, "r")
    assert "\n" not in str(caught.value)
    store.put(commit_key("r", 0), b"{}")
    with pytest.raises(Corrupt, match=r"run: Field required; .*; \d+ more\. Restore"):
        ledger.head(store, "r")


def test_a_changed_byte_breaks_the_chain_by_name(store: ObjectStore) -> None:
    make_chain(store, 4)
    payload = store.get(commit_key("r", 1))
    store.put(commit_key("r", 1), payload.replace(b'"reward_mean":0.5', b'"reward_mean":0.6'))
    with pytest.raises(Corrupt, match="breaks at step 2"):
        list(ledger.commits(store, "r"))
    with pytest.raises(Corrupt, match="breaks at step 2"):
        list(ledger.commits(store, "r", start=2))
    store.put(run_key("r"), records.run_record(launch_id="changed").to_bytes())
    with pytest.raises(Corrupt, match="breaks at step 0"):
        list(ledger.commits(store, "r"))


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff\xfe", b'{"step": 1}', b"[]"])
def test_what_does_not_parse_is_corrupt_with_its_key(payload: bytes, store: ObjectStore) -> None:
    store.put(run_key("r"), payload)
    store.put(commit_key("r", 0), payload)
    with pytest.raises(Corrupt, match=r"runs/r/run\.json is not a RunRecord"):
        ledger.read_run(store, "r")
    store.delete(run_key("r"))
    with pytest.raises(Corrupt, match=r"commit\.json is not a StepCommit"):
        ledger.head(store, "r")


def test_a_commit_under_the_wrong_step_is_corrupt(store: ObjectStore) -> None:
    store.put(commit_key("r", 3), records.commit(4, "p").to_bytes())
    with pytest.raises(Corrupt, match="step 3 of run 'r', found step 4"):
        ledger.read_commit(store, "r", 3)


def test_the_first_record_of_a_request_stands(store: ObjectStore) -> None:
    first, second = records.stage_record(attempt="one"), records.stage_record(attempt="two")
    digest = first.request_digest
    assert ledger.find_record(store, SCOPE, stage="rollout-0003", request_digest=digest) is None
    standing, ref = ledger.put_record(store, SCOPE, first)
    assert standing == first
    assert ledger.put_record(store, SCOPE, second) == (first, ref)
    found = ledger.find_record(store, SCOPE, stage="rollout-0003", request_digest=digest)
    assert found == first
    assert ledger.read_record(store, ref) == first
    assert ledger.record_ref(SCOPE, first, store=store) == ref


def test_another_request_is_another_key(store: ObjectStore) -> None:
    one, two = records.stage_record(body={"seed": "1"}), records.stage_record(body={"seed": "2"})
    ledger.put_record(store, SCOPE, one)
    assert ledger.put_record(store, SCOPE, two)[0] == two
    shard = records.stage_record(stage="rollout-0004", body={"seed": "1"})
    assert shard.request_digest == one.request_digest
    assert ledger.put_record(store, SCOPE, shard)[0] == shard


def test_a_record_of_another_request_under_this_key_is_corrupt(store: ObjectStore) -> None:
    mine, other = records.stage_record(body={"seed": "1"}), records.stage_record(body={"seed": "2"})
    key = record_key(SCOPE, mine.stage, mine.request_digest)
    for impostor in (other, other.model_copy(update={"request_digest": mine.request_digest})):
        store.put(key, impostor.to_bytes())
        with pytest.raises(Corrupt, match="holds something else"):
            ledger.find_record(store, SCOPE, stage=mine.stage, request_digest=mine.request_digest)


def test_a_record_must_hold_the_request_that_it_names(store: ObjectStore) -> None:
    record = records.stage_record().model_copy(update={"request_digest": "0" * 64})
    with pytest.raises(ValueError, match="Store the body that the digest was taken of"):
        ledger.put_record(store, SCOPE, record)


def test_a_changed_record_is_corrupt_to_whoever_has_its_reference(store: ObjectStore) -> None:
    record, ref = ledger.put_record(store, SCOPE, records.stage_record())
    store.put(ref.key, record.model_copy(update={"attempt": "evil"}).to_bytes())
    with pytest.raises(Corrupt, match="holds something else"):
        ledger.read_record(store, ref)


def test_a_plan_is_adopted_and_superseded_by_the_next_revision(store: ObjectStore) -> None:
    assert ledger.current_plan(store, "r", 1) is None
    first, ref = ledger.adopt_plan(store, records.plan(1))
    assert ledger.adopt_plan(store, records.plan(1, reason="late")) == (first, ref)
    assert ledger.current_plan(store, "r", 1) == (first, ref)
    redo, redo_ref = ledger.adopt_plan(store, records.plan(1, revision=1, reason="NaN"))
    assert ledger.current_plan(store, "r", 1) == (redo, redo_ref)
    assert ledger.read_plan(store, ref) == first
    assert ledger.current_plan(store, "r", 10) is None
    store.put(ref.key, b"{}")
    with pytest.raises(Corrupt, match=r"plan-0000\.json"):
        ledger.read_plan(store, ref)


def test_evaluations_are_kept_by_version(store: ObjectStore) -> None:
    def evaluation(version: int, accuracy: float) -> EvalRecord:
        return EvalRecord(
            run="r",
            suite="held-out",
            policy_version=version,
            policy_digest="d",
            records=[],
            num_prompts=10,
            num_samples=40,
            num_graded=40,
            accuracy=accuracy,
            low=0.1,
            high=0.9,
            reward_mean=None,
            metrics={},
        )

    for version in (9, 10, 100):
        ledger.put_eval(store, evaluation(version, 0.5))
    assert ledger.put_eval(store, evaluation(9, 0.7)).accuracy == 0.5
    store.put("runs/r/evals/00000009/held-out/attempts/a/samples", b"x")
    assert [found.policy_version for found in ledger.read_evals(store, "r")] == [9, 10, 100]


def write_and_record(store: ObjectStore) -> StageRecord:
    """What a stage does: look, data first, record second."""
    digest = records.stage_record().request_digest
    found = ledger.find_record(store, SCOPE, stage="rollout-0003", request_digest=digest)
    if found is not None:
        return found
    samples = put_object(store, attempt_key(SCOPE, "a", "samples.parquet"), b"rows", rows=4)
    return ledger.put_record(store, SCOPE, records.stage_record(outputs={"samples": samples}))[0]


def commit_step(store: ObjectStore) -> tuple[StepCommit, str]:
    """What a step does: record, plan, commit."""
    write_and_record(store)
    ledger.adopt_plan(store, records.plan(0))
    commit, digest, _ = ledger.put_commit(store, records.commit(0, ledger.read_run(store, "r")[1]))
    return commit, digest


def test_a_crash_at_any_call_then_a_retry_gives_one_record_and_one_commit(
    store: ObjectStore,
) -> None:
    run = ledger.create_run(store, records.run_record())

    def fresh() -> ObjectStore:
        for listed in list(store.list("runs/r/steps/")):
            store.delete(listed.key)
        return store

    num_faults = 0
    digests: set[str] = set()
    for faulty in fault_points(commit_step, fresh):
        num_faults += 1
        with pytest.raises(StorageError, match="Provoked"):
            commit_step(faulty)
        before = ledger.head(store, "r")
        _, digest = commit_step(FaultyStore(store))
        assert before is None or before[1] == digest
        digests.add(digest)
        keys = [listed.key for listed in store.list("runs/r/steps/")]
        assert sum("stages/" in key for key in keys) == 1
        assert sum("attempts/" in key for key in keys) == 1
    assert num_faults >= 12
    assert digests == {sha256_hex(records.commit(0, run).to_bytes())}


def test_data_without_its_record_is_not_seen(store: ObjectStore) -> None:
    faulty = FaultyStore(store, fail_at=3)
    with pytest.raises(StorageError, match="put_if_absent"):
        write_and_record(faulty)
    digest = records.stage_record().request_digest
    assert ledger.find_record(store, SCOPE, stage="rollout-0003", request_digest=digest) is None
    assert [listed.key for listed in store.list("runs/")] == [
        attempt_key(SCOPE, "a", "samples.parquet")
    ]
    record = write_and_record(store)
    assert read_object(store, record.outputs["samples"]) == b"rows"
