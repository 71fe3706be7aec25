"""Every object of a whole run is changed, cut, deleted and swapped; each is found and named."""

import re
import uuid

import pytest

from storage.audit import ChainAudit, ChainRequest, audit_chain
from storage.backends.memory import MemoryStore
from storage.errors import NotFound
from storage.layout import commit_key, gc_key, plan_key, run_key
from storage.records import (
    GcRecord,
    GivenUp,
    Plan,
    StepCommit,
)
from storage.signing import Signer, public_hex
from tests.contract.complete_run import Head, next_step, write_fork, write_run, write_stop

RUN = "made"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture
def head(store: MemoryStore) -> Head:
    return write_run(store, 3, evals=(2,))


def audit(
    store: MemoryStore, run: str = RUN, *, head: str | None = None, **asked: object
) -> ChainAudit:
    request = ChainRequest(head=head, **asked)  # type: ignore[arg-type]
    return audit_chain(store, run, request, progress=lambda done, total: None)


def named(found: ChainAudit) -> set[str]:
    return {finding.key for finding in found.tally.findings}


def said(found: ChainAudit) -> str:
    return "\n".join(finding.text for finding in found.tally.findings)


def replace(store: MemoryStore, key: str, payload: bytes) -> None:
    store.put(key, payload)


def sealed_keys(store: MemoryStore) -> list[str]:
    return [entry.key for entry in store.list("")]


def flipped(payload: bytes, position: int) -> bytes:
    return payload[:position] + bytes([payload[position] ^ 1]) + payload[position + 1 :]


def test_a_whole_run_holds_and_every_object_was_looked_at(store: MemoryStore, head: Head):
    found = audit(store)
    assert said(found) == ""
    assert found.tally.counts["objects"] == len(sealed_keys(store))
    assert (found.head_step, found.head_digest) == (3, head.digest)
    assert found.tally.counts["steps"] == 4
    assert found.tally.counts["unreferenced"] == 0
    assert found.tally.notes == []


def test_every_object_that_is_deleted_is_named(store: MemoryStore, head: Head):
    for key in sealed_keys(store):
        payload = store.get(key)
        store.delete(key)
        assert key in named(audit(store, head=head.digest)), key
        replace(store, key, payload)


def test_every_object_that_is_cut_is_named(store: MemoryStore, head: Head):
    for key in sealed_keys(store):
        payload = store.get(key)
        for cut in (payload[:-1], b""):
            replace(store, key, cut)
            assert key in named(audit(store, head=head.digest)), key
        replace(store, key, payload)


def test_every_object_of_which_a_bit_is_flipped_is_named(store: MemoryStore, head: Head):
    for key in sealed_keys(store):
        payload = store.get(key)
        # eval.json is sealed by no digest: what it says is recomputed from its shards elsewhere.
        positions = range(0, len(payload), 1 + len(payload) // 3)
        for position in positions if not key.endswith("/eval.json") else ():
            replace(store, key, flipped(payload, position))
            assert key in named(audit(store, head=head.digest)), (key, position)
        replace(store, key, payload)


def test_an_evaluation_that_names_another_record_than_its_own_is_named(
    store: MemoryStore, head: Head
):
    (key,) = [key for key in sealed_keys(store) if key.endswith("/eval.json")]
    content = store.get(key)
    for word in (b"runs/made/evals", b'"sha256":"'):
        replace(store, key, flipped(content, content.index(word) + len(word)))
        assert key in named(audit(store, head=head.digest)), word
        replace(store, key, content)


def test_every_object_that_takes_a_siblings_place_is_named(store: MemoryStore, head: Head):
    keys = sealed_keys(store)
    kinds: dict[str, list[str]] = {}
    for key in keys:
        kinds.setdefault(kind(key), []).append(key)
    for key in keys:
        siblings = kinds[kind(key)]
        sibling = siblings[siblings.index(key) - 1]
        payload, other = store.get(key), store.get(sibling)
        if payload == other:
            continue
        replace(store, key, other)
        replace(store, sibling, payload)
        assert {key, sibling} <= named(audit(store, head=head.digest)), (key, sibling)
        replace(store, key, payload)
        replace(store, sibling, other)


def kind(key: str) -> str:
    return re.sub(r"[0-9a-f]{64}|\d+", "#", key)


def test_swapped_shards_are_told_by_their_owners(store: MemoryStore, head: Head):
    first, second = [key for key in sealed_keys(store) if "00000002/attempts/attempt/rol" in key]
    one, two = store.get(first), store.get(second)
    replace(store, first, two)
    replace(store, second, one)
    found = {finding.key: finding.found for finding in audit(store).tally.findings}
    assert found == {first: f"the bytes of {second}", second: f"the bytes of {first}"}


def test_a_changed_commit_is_told_from_the_one_that_names_it(store: MemoryStore, head: Head):
    key = commit_key(RUN, 2)
    changed = store.get(key).replace(b'"reward_mean":0.5', b'"reward_mean":0.6')
    replace(store, key, changed)
    # The plan of step 3 is a second witness of what commit 2 was.
    assert named(audit(store)) == {key}


def test_without_a_known_head_a_cut_tail_leaves_no_trace(store: MemoryStore, head: Head):
    delete_step(store, 3)
    found = audit(store)
    assert (said(found), found.tail_step) == ("", None)


def delete_step(store: MemoryStore, step: int) -> None:
    for key in sealed_keys(store):
        if f"/steps/{step:08d}/" in key:
            store.delete(key)


def test_with_a_known_head_a_cut_tail_is_found(store: MemoryStore, head: Head):
    delete_step(store, 3)
    found = audit(store, head=head.digest)
    assert named(found) == {commit_key(RUN, 2)}
    assert head.digest in said(found)


def test_a_changed_last_commit_is_found_by_a_known_head(store: MemoryStore, head: Head):
    key = commit_key(RUN, 3)
    replace(store, key, store.get(key).replace(b'"reward_mean":0.5', b'"reward_mean":0.6'))
    assert named(audit(store)) == set()
    assert named(audit(store, head=head.digest)) == {key}


def test_a_head_that_the_run_has_outgrown_still_proves_what_it_seals(
    store: MemoryStore, head: Head
):
    next_step(store, head)
    found = audit(store, head=head.digest)
    assert (said(found), found.head_step, found.tail_step) == ("", 4, 3)


def test_a_later_plan_shows_that_commits_were_cut_off(store: MemoryStore, head: Head):
    later = next_step(store, head)
    open_plan = next_step(store, later).commit.plan.key
    for step in (4, 5):
        store.delete(commit_key(RUN, step))
    assert open_plan == plan_key(RUN, 5, 0)
    found = audit(store)
    assert named(found) == {commit_key(RUN, 4)}
    assert "step 5 was begun" in said(found)


def test_an_open_step_is_fine_unless_its_plan_names_another_head(store: MemoryStore, head: Head):
    next_step(store, head)
    store.delete(commit_key(RUN, 4))
    found = audit(store)
    assert said(found) == ""
    assert found.tally.counts["uncommitted"] > 0
    key = commit_key(RUN, 3)
    replace(store, key, store.get(key).replace(b'"reward_mean":0.5', b'"reward_mean":0.6'))
    assert named(audit(store)) == {key}


def test_a_hole_in_the_chain_is_named_however_wide(store: MemoryStore, head: Head):
    delete_step(store, 1)
    delete_step(store, 2)
    assert commit_key(RUN, 1) in named(audit(store))
    replace(store, commit_key(RUN, 90_000_000), b"{}")
    found = audit(store)
    assert commit_key(RUN, 4) in named(found)
    assert found.tally.counts["steps"] < 8


def test_garbage_of_dead_attempts_is_counted_and_breaks_nothing(store: MemoryStore, head: Head):
    key = "runs/made/steps/00000002/attempts/dead/rollout-0000.parquet"
    replace(store, key, b"12345")
    found = audit(store)
    assert said(found) == ""
    assert found.tally.counts["unreferenced"] == 1
    assert found.tally.counts["unreferenced bytes"] == 5


def test_a_snapshot_of_a_stop_is_looked_at_before_and_after_a_commit_names_it(
    store: MemoryStore, head: Head
):
    stopped = write_stop(store, head)
    key = "runs/made/steps/00000003/attempts/attempt/snapshot/state-00001-of-00001.safetensors"
    for later in (None, lambda: next_step(store, head, stopped=stopped)):
        if later:
            later()
        found = audit(store)
        assert said(found) == ""
        assert found.tally.counts["unreferenced"] == 0
        payload = store.get(key)
        replace(store, key, flipped(payload, 0))
        assert named(audit(store)) == {key}
        replace(store, key, payload)
    assert named(audit(store, first=4, last=4)) == set()
    replace(store, key, b"")
    assert named(audit(store, first=4, last=4)) == {key}


def test_keys_that_nothing_reads_are_named_and_break_nothing(store: MemoryStore, head: Head):
    for key in ("runs/made/steps/00000002/.DS_Store", "runs/made/notes/a", "runs/made/steps/x/b"):
        replace(store, key, b"")
    found = audit(store)
    assert said(found) == ""
    assert len(found.tally.notes) == 3


@pytest.mark.parametrize(
    "key",
    [
        "runs/made/steps/00000002/plan-00001.json",
        "runs/made/steps/00000002/plan-0001.json",
        f"runs/made/steps/00000002/stages/train/{'a' * 64}.json",
        "runs/made/steps/2/commit.json",
        "runs/made/evals/00000003/held_out/eval.json",
        "runs/made/gc/00000000/aa.json",
    ],
)
def test_an_extra_object_that_readers_would_take_for_a_record_is_named(
    store: MemoryStore, head: Head, key: str
):
    replace(store, key, b"{}")
    assert any(key.startswith(name) for name in named(audit(store)))


def test_a_later_plan_than_the_committed_one_is_noted_if_it_is_sound(
    store: MemoryStore, head: Head
):
    plan = Plan.from_bytes(store.get(plan_key(RUN, 2, 0)))
    late = plan.model_copy(update={"revision": 1, "reason": "redo"})
    replace(store, plan_key(RUN, 2, 1), late.to_bytes())
    found = audit(store)
    assert said(found) == ""
    assert plan_key(RUN, 2, 1) in found.tally.notes[0]
    elsewhere = late.model_copy(update={"previous": "0" * 64})
    replace(store, plan_key(RUN, 2, 1), elsewhere.to_bytes())
    assert named(audit(store)) == {plan_key(RUN, 2, 1)}


def test_another_encoding_of_the_last_commit_is_found(store: MemoryStore, head: Head):
    key = commit_key(RUN, 3)
    replace(store, key, store.get(key) + b"\n")
    assert named(audit(store)) == {key}


def forge(store: MemoryStore, **changes: object) -> str:
    """Returns what is said of a last commit whose writer made all digests fit."""
    key = commit_key(RUN, 3)
    payload = store.get(key)
    commit = StepCommit.from_bytes(payload).model_copy(update=changes)
    replace(store, key, commit.to_bytes())
    found = said(audit(store))
    replace(store, key, payload)
    return found


def test_a_commit_that_does_not_follow_is_found_though_all_digests_fit(
    store: MemoryStore, head: Head
):
    commit = head.commit
    before = StepCommit.from_bytes(store.get(commit_key(RUN, 2)))
    assert "policy version 3" in forge(store, policy_version=4)
    assert "digest of the policy" in forge(store, policy_digest="0" * 64)
    assert "cursor" in forge(store, cursor=before.cursor)
    assert "expected state id" in forge(store, state_id=before.state_id)
    assert "stages" in forge(store, records=commit.records[:-1])
    assert "kind train or skipped" in forge(store, kind="genesis")
    assert "expected previous" in forge(store, previous="0" * 64)
    assert "policy" in forge(store, policy=before.policy)
    assert "prompts record" in forge(store, records=[*before.records[:1], *commit.records[1:]])
    assert forge(store, metrics={"reward_mean": 0.7}) == ""


def test_a_skipped_step_keeps_policy_and_state(store: MemoryStore):
    write_run(store, 3, skipped=(2,))
    assert said(audit(store)) == ""
    key = commit_key(RUN, 2)
    commit = StepCommit.from_bytes(store.get(key))
    replace(store, key, commit.model_copy(update={"state_id": "0" * 64}).to_bytes())
    assert f"{key}: expected state id" in said(audit(store))


def test_a_fork_rests_on_its_parents_up_to_the_step_it_left_from(store: MemoryStore, head: Head):
    write_fork(store, head, run="fork", steps=2)
    later = next_step(store, head)
    found = audit(store, "fork")
    assert (said(found), found.head_step) == ("", 5)
    assert found.tally.counts["steps"] == 4 + 3
    shard = later.commit.plan.key
    replace(store, shard, b"")
    assert said(audit(store, "fork")) == ""
    replace(store, commit_key(RUN, 1), store.get(commit_key(RUN, 1)) + b" ")
    assert commit_key(RUN, 1) in named(audit(store, "fork"))


def test_a_fork_whose_parent_was_rewritten_is_found(store: MemoryStore, head: Head):
    write_fork(store, head, run="fork", steps=1)
    key = commit_key(RUN, 3)
    replace(store, key, store.get(key).replace(b'"reward_mean":0.5', b'"reward_mean":0.6'))
    assert f"{key}: expected digest, as the fork names it, {head.digest}" in said(
        audit(store, "fork")
    )
    store.delete(run_key(RUN))
    assert run_key(RUN) in named(audit(store, "fork"))


def test_some_steps_are_checked_alone_on_the_commit_before_them(store: MemoryStore):
    head = write_run(store, 30, snapshot_every=10)
    found = audit(store, first=10, last=20)
    assert (said(found), found.tally.counts["steps"]) == ("", 11)
    replace(store, commit_key(RUN, 25), b"")
    assert said(audit(store, first=10, last=20)) == ""
    assert named(audit(store, first=10, last=20, head=head.digest)) == {commit_key(RUN, 25)}
    store.delete(commit_key(RUN, 9))
    assert named(audit(store, first=10, last=20)) == {commit_key(RUN, 9)}
    store.delete(commit_key(RUN, 15))
    assert commit_key(RUN, 15) in named(audit(store, first=10, last=15))


@pytest.mark.parametrize(("first", "last"), [(4, 5), (2, 1), (None, 9)])
def test_steps_that_the_run_has_not_are_refused(
    store: MemoryStore, head: Head, first: int | None, last: int | None
):
    with pytest.raises(ValueError, match="has steps 0 to 3"):
        audit(store, first=first, last=last)


def test_a_run_that_is_not_there_is_no_finding(store: MemoryStore, head: Head):
    with pytest.raises(NotFound, match="Expected one of its runs"):
        audit(store, "other")


def policy_keys(store: MemoryStore, step: int) -> list[str]:
    where = f"/steps/{step:08d}/attempts/attempt/"
    return [
        key for key in sealed_keys(store) if where in key and ("/policy/" in key or "/snap" in key)
    ]


def give_up(store: MemoryStore, keys: list[str], *, head: int) -> None:
    objects = [
        GivenUp(key=key, kind="policy" if "/policy/" in key else "snapshot", num_bytes=1, why="old")
        for key in keys
    ]
    record = GcRecord(
        run=RUN, head=head, rule={}, objects=objects, attempt="a", created_at="2026-11-29T00:00:00Z"
    )
    replace(store, gc_key(RUN, 1, record.content_digest()), record.to_bytes())
    for key in keys:
        store.delete(key)


def test_what_retention_gave_up_is_no_break(store: MemoryStore):
    write_run(store, 5)
    keys = [*policy_keys(store, 1), *policy_keys(store, 2)]
    give_up(store, keys, head=5)
    found = audit(store)
    assert said(found) == ""
    assert found.tally.given_up == {"policy file": 2, "snapshot file": 1}


def test_a_gc_record_excuses_neither_genesis_nor_the_head_nor_experience(store: MemoryStore):
    write_run(store, 5)
    kept = [*policy_keys(store, 0), *policy_keys(store, 5)]
    shard = "runs/made/steps/00000002/attempts/attempt/train.parquet"
    give_up(store, [*kept, shard], head=5)
    assert named(audit(store)) == {*kept, shard}


def test_a_gc_record_of_a_head_that_is_not_there_excuses_nothing_and_shows_a_cut_tail(
    store: MemoryStore,
):
    write_run(store, 5)
    keys = policy_keys(store, 4)
    give_up(store, keys, head=10**6)
    found = audit(store)
    assert set(keys) <= named(found)
    assert "commit of step 1000000" in said(found)


@pytest.fixture
def signer() -> Signer:
    return Signer.generate()


def test_a_key_demands_a_good_signature_of_every_commit(store: MemoryStore, signer: Signer):
    head = write_run(store, 2, signer=signer)
    unsigned = audit(store)
    assert unsigned.tally.counts["signature self-asserted"] == 3
    assert said(audit(store, key=signer.public_key())) == ""
    other = audit(store, key=Signer.generate().public_key())
    assert named(other) == {commit_key(RUN, step) for step in range(3)}
    assert public_hex(signer) in said(other)
    next_step(store, head)
    assert named(audit(store, key=signer.public_key())) == {commit_key(RUN, 3)}


def test_a_broken_signature_is_found_without_a_key(store: MemoryStore, signer: Signer):
    write_run(store, 1, signer=signer)
    key = commit_key(RUN, 1)
    replace(store, key, store.get(key).replace(b'"reward_mean":0.5', b'"reward_mean":0.6'))
    assert "the bytes of the commit are not those that were signed" in said(audit(store))


def test_a_record_that_a_newer_rollbook_wrote_is_said_to_be_one(store: MemoryStore, head: Head):
    key = commit_key(RUN, 3)
    replace(store, key, store.get(key).replace(b'"schema_version":1', b'"schema_version":2'))
    assert f"{key}: expected schema version 1; found 2" in said(audit(store))
