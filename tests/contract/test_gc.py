"""Garbage goes, whatever a commit needs stays, whoever else is at work meanwhile."""

import contextlib
import threading
import uuid
from collections.abc import Callable

import pytest

from flows.gc import plan_gc, run_gc
from storage.backends.memory import MemoryStore
from storage.errors import CommitConflict, CommitUnknown, Corrupt, NotFound, StorageError
from storage.given_up import check_policy_kept, find_given_up, given_up, nearest_kept
from storage.layout import commit_key, gc_prefix, is_snapshot_key, run_key, run_prefix, step_of_key
from storage.ledger import commits, create_run, read_commit, read_plan, read_record, read_run
from storage.object_store import ObjectStore
from storage.objects import read_object
from storage.records import ObjectRef, StageRecord
from storage.retention import Rule
from tests.contract.faulty_store import FaultyStore, fault_points
from tests.contract.records import run_record
from tests.contract.synthetic_runs import SyntheticRun

RULE = Rule(policies_last=2, policies_every=10, snapshots_last=2, snapshots_every=20, pinned=[])


@pytest.fixture
def memory() -> ObjectStore:
    return MemoryStore(uuid.uuid4().hex)


def keys(store: ObjectStore, run: str = "r") -> set[str]:
    said = gc_prefix(run)
    return {e.key for e in store.list(run_prefix(run)) if not e.key.startswith(said)}


def policies(store: ObjectStore, run: SyntheticRun) -> list[int]:
    """The steps whose policy can be opened."""

    def is_there(step: int) -> bool:
        try:
            check_policy_kept(store, run.commits[step])
        except NotFound:
            return False
        return True

    return [step for step in sorted(run.commits) if is_there(step)]


def snapshots(store: ObjectStore, run: str = "r") -> list[int]:
    return sorted({step_of_key(key) for key in keys(store, run) if is_snapshot_key(key)})


def read_everything_that_stays(store: ObjectStore, run: str = "r") -> None:
    """Reads plans, records, experience and probes of all steps; raises if one is gone."""
    for commit, _ in commits(store, run):
        read_plan(store, commit.plan)
        read_object(store, commit.policy.probe)
        for ref in commit.records:
            for output in read_record(store, ref).outputs.values():
                read_object(store, output)


def test_everything_but_old_policies_and_snapshots_stays(store: ObjectStore) -> None:
    run = SyntheticRun(store).steps(13)
    before = keys(store)
    report = run_gc(store, "r", rule=RULE)
    assert policies(store, run) == [0, 10, 12, 13]
    assert snapshots(store) == [0, 10, 12]
    read_everything_that_stays(store)
    gone = before - keys(store)
    assert all("/policy/" in key or "/snapshot/" in key for key in gone)
    assert len(gone) == sum(tally.objects for tally in report.goes.values())


def test_without_delete_nothing_changes_and_the_same_is_named(memory: ObjectStore) -> None:
    SyntheticRun(memory).steps(13)
    before = {entry.key: memory.get(entry.key) for entry in memory.list("")}
    planned = plan_gc(memory, "r", rule=RULE)
    assert {entry.key: memory.get(entry.key) for entry in memory.list("")} == before
    done = run_gc(memory, "r", rule=RULE)
    assert (planned.goes, planned.stays) == (done.goes, done.stays)
    assert plan_gc(memory, "r", rule=RULE).goes == {}


def test_what_is_given_up_is_said_with_its_digest_before_it_goes(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(5)
    lost = run.commits[1].policy.files[0]
    report = run_gc(memory, "r", rule=RULE)
    said = {gone.key: gone for gone in given_up(memory, "r")}
    assert said[lost.key].sha256 == lost.sha256
    assert said[lost.key].kind == "policy"
    assert find_given_up(memory, lost) == said[lost.key]
    assert find_given_up(memory, run.commits[1].policy.probe) is None
    assert [key.startswith("runs/r/gc/00000000/") for key in report.records] == [True]


def test_a_policy_that_was_given_up_is_told_from_a_lost_one(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(15)
    run_gc(memory, "r", rule=RULE)
    with pytest.raises(NotFound, match=r"given up by retention.*rollbook fork r@10 --run NEW"):
        check_policy_kept(memory, run.commits[11])
    assert nearest_kept(memory, "r", 11) == 10
    memory.delete(run.commits[15].policy.files[0].key)
    with pytest.raises(NotFound, match="no gc gave it up"):
        check_policy_kept(memory, run.commits[15])


def test_a_later_rule_brings_nothing_back_and_does_not_claim_to(memory: ObjectStore) -> None:
    SyntheticRun(memory, snapshots_every=0).steps(25)
    run_gc(memory, "r", rule=RULE)
    kinder = RULE.model_copy(update={"policies_every": 5})
    assert sorted(run_gc(memory, "r", rule=kinder).policies) == [0, 10, 20, 24, 25]


def test_objects_of_losers_go_and_their_records_stay(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(2)
    left = set(run.begin(3))
    run.steps(2)
    report = run_gc(memory, "r", rule=RULE)
    records = {key for key in left if "/stages/" in key}
    assert report.goes["unreferenced"].objects == len(left - records) == 4
    assert left & keys(memory) == records


def test_open_steps_and_the_newest_one_are_not_touched(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(4)
    unfinished = run.leftover(4, "snapshot/state.safetensors")
    left = [*run.begin(5), *run.begin(6), unfinished.key]
    run_gc(memory, "r", rule=RULE)
    assert set(left) <= keys(memory)
    assert run.commits[4].policy.files[0].key in keys(memory)


def test_a_snapshot_of_the_head_stays_until_the_next_ones_are_there(memory: ObjectStore) -> None:
    run = SyntheticRun(memory, snapshots_every=0).steps(3)
    made = read_record(memory, run.stop()).snapshot
    assert made is not None
    file = made.files["state.safetensors"].key
    for _ in range(3):
        run_gc(memory, "r", rule=RULE)
        assert file in keys(memory)
        run.step()
    run.snapshots_every = 1
    run.steps(3)
    run_gc(memory, "r", rule=RULE)
    assert snapshots(memory) == [0, 8, 9]
    assert find_given_up(memory, made.files["state.safetensors"]) is not None


def test_a_policy_that_did_not_change_stays_while_any_kept_step_names_it(
    memory: ObjectStore,
) -> None:
    run = SyntheticRun(memory, snapshots_every=0).steps(8)
    run.skip()
    run.step(changed=False)
    run.steps(5)
    run_gc(memory, "r", rule=RULE)
    assert policies(memory, run) == [0, 8, 9, 10, 14, 15]


def test_the_state_after_a_rebase_can_always_be_restored(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(2)
    run.step(rebased=True)
    run.steps(9)
    run_gc(memory, "r", rule=RULE)
    assert snapshots(memory) == [0, 3, 10, 12]


def test_a_fork_keeps_where_it_began_and_its_gc_leaves_the_parent_alone(
    memory: ObjectStore,
) -> None:
    parent = SyntheticRun(memory).steps(7)
    fork = SyntheticRun(memory, "f", parent=(parent, 5))
    grandchild = SyntheticRun(memory, "g", parent=(fork, 5))
    parent.steps(8)
    fork.steps(6)
    grandchild.steps(6)
    run_gc(memory, "r", rule=RULE)
    assert policies(memory, parent) == [0, 4, 5, 10, 12, 14, 15]
    assert snapshots(memory) == [0, 4, 12, 14]
    before = keys(memory)
    run_gc(memory, "f", rule=RULE)
    run_gc(memory, "g", rule=RULE)
    assert keys(memory) == before
    assert policies(memory, fork) == [5, 6, 8, 10, 11]
    assert policies(memory, grandchild)[0] == 5


def test_what_a_fork_names_of_its_parent_stays_whatever_the_rule_says(memory: ObjectStore) -> None:
    parent = SyntheticRun(memory, snapshots_every=0).steps(3)
    fork = SyntheticRun(memory, "f", parent=(parent, 3))
    borrowed = parent.steps(3).commits[5].policy
    fork.commits[3] = fork.commits[3].model_copy(update={"policy": borrowed})
    fork.step(changed=False)
    parent.steps(6)
    run_gc(memory, "r", rule=RULE)
    assert policies(memory, parent) == [0, 3, 5, 10, 11, 12]


class Interrupting(FaultyStore):
    """Passes every call on, and does something else before the first whose name matches."""

    def __init__(self, store: ObjectStore, at: str, act: Callable[[], object]) -> None:
        super().__init__(store)
        self._at, self._act = at, act
        self._done = False

    def _call(self, name, call):
        if not self._done and name.startswith(self._at):
            self._done = True
            self._act()
        return super()._call(name, call)


def test_a_fork_made_before_the_deletions_stops_them(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(13)
    before = keys(memory)

    def fork() -> None:
        made = SyntheticRun(memory, "f", parent=(run, 7))
        check_policy_kept(memory, made.commits[7])

    store = Interrupting(memory, "put_if_absent runs/r/gc/", fork)
    with pytest.raises(CommitConflict, match="was forked as f while gc"):
        run_gc(store, "r", rule=RULE)
    assert keys(memory) == before
    assert list(given_up(memory, "r")) == []
    run_gc(memory, "r", rule=RULE)
    assert policies(memory, run) == [0, 6, 7, 10, 12, 13]


def test_a_fork_made_during_the_deletions_is_refused(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(13)
    refused: list[str] = []

    def fork() -> None:
        made = SyntheticRun(memory, "f", parent=(run, 7))
        with pytest.raises(NotFound, match="given up by retention"):
            check_policy_kept(memory, made.commits[7])
        refused.append(made.run)

    run_gc(Interrupting(memory, "delete runs/r/steps/", fork), "r", rule=RULE)
    assert refused == ["f"]
    assert policies(memory, run) == [0, 10, 12, 13]


def test_a_fork_that_has_only_its_run_json_counts(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(13)
    fork = SyntheticRun(memory, "f", parent=(run, 7))
    memory.delete(commit_key("f", 7))
    run_gc(memory, "r", rule=RULE)
    assert 7 in policies(memory, run)
    assert fork.head == 7


def test_an_interrupted_gc_loses_nothing_and_a_second_one_ends_it() -> None:
    made: list[SyntheticRun] = []

    def make() -> ObjectStore:
        made.append(SyntheticRun(MemoryStore(uuid.uuid4().hex)).steps(7))
        made[-1].leftover(2, "train.parquet")
        return made[-1].store

    for store in fault_points(lambda store: run_gc(store, "r", rule=RULE), make):
        run = made[-1]
        before = keys(run.store)
        with contextlib.suppress(StorageError):
            run_gc(store, "r", rule=RULE)
        said = {gone.key for gone in given_up(run.store, "r")}
        assert before - keys(run.store) <= said
        run_gc(run.store, "r", rule=RULE)
        assert policies(run.store, run) == [0, 4, 6, 7]
        assert snapshots(run.store) == [0, 4, 6]
        read_everything_that_stays(run.store)


def test_an_unanswered_record_deletes_nothing(memory: ObjectStore) -> None:
    SyntheticRun(memory).steps(5)
    before = keys(memory)

    def fail() -> None:
        raise CommitUnknown("no answer")

    with pytest.raises(CommitUnknown):
        run_gc(Interrupting(memory, "put_if_absent runs/r/gc/", fail), "r", rule=RULE)
    assert keys(memory) == before


def test_two_gcs_at_once_end_in_the_same_store(store: ObjectStore) -> None:
    run = SyntheticRun(store).steps(13)
    threads = [
        threading.Thread(target=lambda: run_gc(store, "r", rule=RULE), name=f"gc-{number}")
        for number in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert policies(store, run) == [0, 10, 12, 13]
    read_everything_that_stays(store)


def test_beside_a_run_that_goes_on_no_commit_loses_what_it_needs(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(3)
    training = threading.Thread(target=lambda: run.steps(40), name="training")
    training.start()
    while training.is_alive():
        head = run.head
        run_gc(memory, "r", rule=RULE)
        assert head in policies(memory, run)
    training.join()
    read_everything_that_stays(memory)
    assert {42, 43} <= set(policies(memory, run))


def test_a_writer_that_wakes_below_a_committed_step_changes_nothing(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(6)
    written = run.leftover(3, "policy/model.safetensors")
    run_gc(memory, "r", rule=RULE)
    assert written.key not in keys(memory)
    chain = [digest for _, digest in commits(memory, "r")]
    late = run.record(3, "train", body={"late": 1}, policy=run.commits[3].policy)
    more = run.leftover(3, "snapshot/state.safetensors")
    assert [digest for _, digest in commits(memory, "r")] == chain
    run_gc(memory, "r", rule=RULE)
    assert more.key not in keys(memory)
    assert late.key in keys(memory)
    read_everything_that_stays(memory)


@pytest.mark.parametrize("what", ["commit", "record", "fork's run.json"])
def test_a_damaged_run_is_left_as_it_is(memory: ObjectStore, what: str) -> None:
    run = SyntheticRun(memory).steps(6)
    SyntheticRun(memory, "f", parent=(run, 2))
    damaged = {
        "commit": commit_key("r", 3),
        "record": run.commits[3].records[-1].key,
        "fork's run.json": run_key("f"),
    }[what]
    memory.put(damaged, b"{}")
    before = keys(memory)
    with pytest.raises(Corrupt, match=damaged):
        run_gc(memory, "r", rule=RULE)
    assert keys(memory) == before


def test_a_run_without_a_commit_has_no_garbage(memory: ObjectStore) -> None:
    create_run(memory, run_record())
    with pytest.raises(NotFound, match="no commit yet"):
        run_gc(memory, "r", rule=RULE)


def test_what_somebody_put_beside_the_steps_stays_and_stops_nobody(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(13)
    strangers = [f"{run_prefix('r')}steps/.DS_Store", f"{run_prefix('r')}steps/notes/todo.txt"]
    for key in strangers:
        memory.put(key, b"not ours")
    run_gc(memory, "r", rule=RULE)
    assert policies(memory, run) == [0, 10, 12, 13]
    assert set(strangers) < keys(memory)


def test_half_a_snapshot_goes_and_counts_for_nothing(memory: ObjectStore) -> None:
    run = SyntheticRun(memory).steps(9)
    ref = run.commits[8].records[-1]
    record: StageRecord = read_record(memory, ref)
    assert record.snapshot is not None
    file: ObjectRef = record.snapshot.files["state.safetensors"]
    memory.put(file.key, b"half")
    run_gc(memory, "r", rule=RULE)
    assert snapshots(memory) == [0, 4, 6]
    assert read_commit(memory, "r", 8)[0] == run.commits[8]
    assert read_run(memory, "r")[0].run == "r"
