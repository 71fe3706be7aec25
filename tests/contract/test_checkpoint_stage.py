"""The checkpoint stage commits closed steps only, once, whoever else tries."""

import re
import uuid
from typing import Any

import pytest

from storage.backends.memory import MemoryStore
from storage.errors import CommitConflict, Corrupt, NotFound
from storage.layout import StepScope, attempt_key, commit_key
from storage.ledger import (
    adopt_plan,
    ancestors,
    create_run,
    head,
    lineage,
    put_record,
    read_record,
    read_run,
)
from storage.object_store import ObjectStore
from storage.objects import put_object
from storage.records import (
    Cursor,
    InputRef,
    ObjectRef,
    ParentRef,
    Plan,
    PolicyRef,
    PromptInputs,
    RecordRef,
    RunRecord,
    SamplingPolicy,
    ShardPlan,
    StageRecord,
    request_digest,
    sha256_hex,
)
from storage.signing import Signer, check_signature
from tasks.checkpoint.contract import CheckpointRequest, CheckpointResult
from tasks.checkpoint.stage import run

RUN = "addition-1"


@pytest.fixture
def store() -> ObjectStore:
    return MemoryStore(uuid.uuid4().hex)


def put(store: ObjectStore, step: int, name: str, payload: bytes) -> ObjectRef:
    key = attempt_key(StepScope(run=RUN, step=step), "attempt", name)
    return put_object(store, key, payload)


def record(
    store: ObjectStore,
    step: int,
    stage: str,
    request: dict[str, Any],
    outputs: dict[str, ObjectRef],
    policy: PolicyRef | None = None,
) -> RecordRef:
    made = StageRecord(
        stage=stage,
        request=request,
        request_digest=request_digest(stage.partition("-")[0], request),
        outputs=outputs,
        policy=policy,
        attempt="attempt",
        environment={},
        environment_digest="",
    )
    return put_record(store, StepScope(run=RUN, step=step), made)[1]


def policy(store: ObjectStore, step: int) -> PolicyRef:
    return PolicyRef(
        version=step,
        digest=f"policy {step}",
        dtype="float32",
        files=[put(store, step, "model.safetensors", f"weights {step}".encode())],
        probe=put(store, step, "probe.json", b"{}"),
    )


def plan(
    store: ObjectStore,
    step: int,
    previous: str,
    *,
    prompts: RecordRef | None = None,
    num_shards: int = 0,
    revision: int = 0,
    skipped: bool = False,
) -> ObjectRef:
    sampling = SamplingPolicy(group_size=1, temperature=1.0, max_tokens=1, stop_token_ids=[1])
    shards = [
        ShardPlan(
            index=index,
            start=index,
            stop=index + 1,
            sampling=sampling,
            policy_version=step - 1,
            policy_digest="",
            seed=1,
        )
        for index in range(num_shards)
    ]
    kind = "skipped" if skipped else "train" if step else "genesis"
    return adopt_plan(
        store,
        Plan(
            run=RUN,
            step=step,
            revision=revision,
            kind=kind,
            previous=previous,
            prompts=prompts,
            shards=shards,
            cursor=Cursor(),
            configs={},
        ),
    )[1]


def genesis(store: ObjectStore) -> CheckpointResult:
    empty = ObjectRef(key="inputs/none", sha256="", num_bytes=0)
    digest = create_run(
        store,
        RunRecord(
            run=RUN,
            launch_id="1",
            config={},
            prompts=PromptInputs(mixture_digest="", sets=[], train=empty, held_out=empty),
            model=InputRef(digest="", files={}),
            weights={"model.safetensors": "5" * 64},
            stop_token_ids=[1],
            created_at="",
        ),
    )
    made = record(store, 0, "train", {"kind": "genesis"}, {}, policy(store, 0))
    request = CheckpointRequest(
        scope=StepScope(run=RUN, step=0),
        kind="genesis",
        plan=plan(store, 0, digest),
        records=[made],
        cursor=Cursor(),
        previous=digest,
        metrics={},
    )
    return run(request, store)


def first_step(
    store: ObjectStore, before: CheckpointResult, **changes: Any
) -> tuple[CheckpointRequest, dict[str, ObjectRef]]:
    """A closed step 1 of two shards; `changes` replace fields of single requests."""
    objects = {
        name: put(store, 1, name, name.encode())
        for name in ("prompts", "samples0", "samples1", "rewards0", "rewards1", "train")
    }
    refs = [record(store, 1, "prompts", {"seed": "0"}, {"prompts": objects["prompts"]})]
    for shard in (0, 1):
        body = {
            "prompts": objects["prompts"].sha256,
            "policy": changes.get("policy", before.commit.policy_digest),
            "rows": changes.get("rows", [shard, shard + 1]),
            "seed": str(shard),
        }
        samples = objects[f"samples{shard}"]
        refs.append(record(store, 1, f"rollout-000{shard}", body, {"samples": samples}))
        graded = {
            "samples": changes.get("graded", samples.sha256),
            "prompts": changes.get("graded_prompts", objects["prompts"].sha256),
        }
        rewards = objects[f"rewards{shard}"]
        refs.append(record(store, 1, f"reward-000{shard}", graded, {"rewards": rewards}))
    trained = {
        "samples": [objects["samples0"].sha256, objects["samples1"].sha256],
        "rewards": changes.get("rewards", [objects["rewards0"].sha256, objects["rewards1"].sha256]),
        "policy": changes.get("trained_policy", before.commit.policy_digest),
        "state_id": changes.get("state_id", before.commit.state_id),
    }
    refs.append(record(store, 1, "train", trained, {"train": objects["train"]}, policy(store, 1)))
    request = CheckpointRequest(
        scope=StepScope(run=RUN, step=1),
        kind="train",
        plan=plan(store, 1, before.digest, prompts=refs[0], num_shards=2),
        records=refs,
        cursor=Cursor(drawn=2),
        previous=before.digest,
        metrics={"reward_mean": 0.5},
    )
    return request, objects


def test_a_closed_step_is_committed_and_named_by_the_next_state_id(store: ObjectStore):
    before = genesis(store)
    request, _ = first_step(store, before)
    result = run(request, store)
    assert result.ours
    assert result.commit.previous == before.digest
    assert result.commit.policy_version == 1
    assert result.commit.state_id == request.records[-1].sha256
    assert head(store, RUN) == (result.commit, result.digest)


def test_a_commit_is_signed_by_the_key_that_the_controller_holds(store: ObjectStore):
    request, _ = first_step(store, genesis(store))
    signer = Signer.generate()
    result = run(request, store, signer)
    payload = store.get(commit_key(RUN, 1))
    assert check_signature(payload, signer.public_key()).verdict == "good"
    assert sha256_hex(payload) == result.digest
    assert check_signature(store.get(commit_key(RUN, 0)), None).verdict == "missing"


def test_a_second_attempt_adopts_the_commit_that_stands(store: ObjectStore):
    request, _ = first_step(store, genesis(store))
    first, second = run(request, store), run(request, store)
    assert first.ours
    assert not second.ours
    assert (second.commit, second.digest) == (first.commit, first.digest)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"policy": "another policy"}, "policy of rollout-0000 is"),
        ({"graded": "0" * 64}, "samples of reward-0000 is"),
        ({"rewards": []}, "rewards of train is"),
        ({"state_id": "another state"}, "state_id of train is"),
        ({"trained_policy": "another policy"}, "policy of train is"),
        ({"graded_prompts": "0" * 64}, "prompts of reward-0000 is"),
        ({"rows": [0, 2]}, "rows of rollout-0000 is"),
    ],
)
def test_a_record_of_other_inputs_is_named_and_nothing_committed(
    store: ObjectStore, changes: dict[str, Any], named: str
):
    before = genesis(store)
    request, _ = first_step(store, before, **changes)
    with pytest.raises(Corrupt, match=named):
        run(request, store)
    assert head(store, RUN) == (before.commit, before.digest)


def test_a_step_without_one_of_its_shards_is_not_closed(store: ObjectStore):
    request, _ = first_step(store, genesis(store))
    for left_out in range(len(request.records)):
        records = [ref for at, ref in enumerate(request.records) if at != left_out]
        with pytest.raises(Corrupt, match="stages of the step"):
            run(request.model_copy(update={"records": records}), store)


def test_a_plan_of_other_prompts_another_step_or_history_is_refused(store: ObjectStore):
    before = genesis(store)
    request, _ = first_step(store, before)
    others = {
        "prompts record": plan(
            store, 1, before.digest, prompts=request.records[1], num_shards=2, revision=1
        ),
        "step": plan(store, 2, before.digest),
        "previous commit": plan(store, 1, "another", prompts=request.records[0], revision=2),
    }
    for named, other in others.items():
        with pytest.raises(Corrupt, match=f"{named} of the plan is"):
            run(request.model_copy(update={"plan": other}), store)
    assert head(store, RUN) == (before.commit, before.digest)


@pytest.mark.parametrize("name", ["samples1", "rewards0", "train", "prompts"])
def test_a_missing_or_cut_object_is_named_and_nothing_committed(store: ObjectStore, name: str):
    before = genesis(store)
    request, objects = first_step(store, before)
    store.put(objects[name].key, b"")
    with pytest.raises(Corrupt, match="has 0 bytes"):
        run(request, store)
    store.delete(objects[name].key)
    with pytest.raises(NotFound, match=name):
        run(request, store)
    assert head(store, RUN) == (before.commit, before.digest)


@pytest.mark.parametrize("stage", ["rollout-0001", "train", "prompts"])
def test_a_lost_output_of_an_uncommitted_step_offers_to_do_it_again(store: ObjectStore, stage: str):
    request, _ = first_step(store, genesis(store))
    ref = next(ref for ref in request.records if ref.stage == stage)
    (output,) = read_record(store, ref).outputs.values()
    store.delete(output.key)
    with pytest.raises(NotFound, match=f"{re.escape(ref.key)} says.*uncommitted.*--redo"):
        run(request, store)
    assert read_record(store, ref).stage == stage


def test_a_lost_output_of_a_step_committed_meanwhile_asks_to_delete_nothing(store: ObjectStore):
    request, objects = first_step(store, genesis(store))
    assert run(request, store).ours
    store.delete(objects["samples1"].key)
    with pytest.raises(NotFound, match="delete nothing"):
        run(request, store)


def test_a_missing_policy_file_is_named(store: ObjectStore):
    before = genesis(store)
    request, _ = first_step(store, before)
    store.delete(attempt_key(StepScope(run=RUN, step=1), "attempt", "model.safetensors"))
    with pytest.raises(NotFound, match=r"model\.safetensors"):
        run(request, store)


def test_a_changed_record_is_corrupt(store: ObjectStore):
    request, _ = first_step(store, genesis(store))
    ref = request.records[1]
    store.put(ref.key, store.get(ref.key).replace(b'"attempt":"attempt"', b'"attempt":"other"'))
    with pytest.raises(Corrupt, match="rollout-0000"):
        run(request, store)


def test_a_step_built_on_another_history_is_a_conflict(store: ObjectStore):
    before = genesis(store)
    request, _ = first_step(store, before)
    with pytest.raises(CommitConflict, match="Read the head again"):
        run(request.model_copy(update={"previous": "another commit"}), store)


def skipped_step(store: ObjectStore, before: CheckpointResult) -> CheckpointRequest:
    """Step 1 as it is committed after its first plan was superseded by one that skips it."""
    request, _ = first_step(store, before)
    prompts = request.records[0]
    superseding = plan(store, 1, before.digest, prompts=prompts, revision=1, skipped=True)
    return request.model_copy(
        update={"kind": "skipped", "records": [prompts], "plan": superseding, "metrics": {}}
    )


def test_a_skipped_step_keeps_the_policy_and_consumes_the_groups(store: ObjectStore):
    before = genesis(store)
    commit = run(skipped_step(store, before), store).commit
    assert (commit.policy_digest, commit.state_id) == ("policy 0", before.commit.state_id)
    assert commit.policy_version == commit.policy.version == 1
    assert commit.cursor.drawn == 2


def test_only_a_plan_that_skips_lets_a_step_be_skipped(store: ObjectStore):
    request, _ = first_step(store, genesis(store))
    skipped = request.model_copy(update={"kind": "skipped"})
    with pytest.raises(Corrupt, match="stages of the step"):
        run(skipped, store)
    only = skipped.model_copy(
        update={
            "records": request.records[:1],
            "plan": plan(store, 1, request.previous, prompts=request.records[0], revision=1),
        }
    )
    with pytest.raises(Corrupt, match=r"kind of the plan is train\. Expected skipped"):
        run(only, store)


def test_a_step_may_name_the_snapshot_of_the_state_before_it(store: ObjectStore):
    before = genesis(store)
    request, _ = first_step(store, before)
    for state_id in ("another state", before.commit.state_id):
        saved = record(store, 0, "snapshot", {"kind": "snapshot", "state_id": state_id}, {})
        named = request.model_copy(update={"records": [*request.records, saved]})
        if state_id == "another state":
            with pytest.raises(Corrupt, match="state_id of snapshot is another state"):
                run(named, store)
        else:
            assert saved in run(named, store).commit.records


def test_a_skipped_step_may_name_it_too(store: ObjectStore):
    before = genesis(store)
    request = skipped_step(store, before)
    body = {"kind": "snapshot", "state_id": before.commit.state_id}
    saved = record(store, 0, "snapshot", body, {})
    named = request.model_copy(update={"records": [*request.records, saved]})
    assert run(named, store).commit.records == named.records


def fork_request(
    store: ObjectStore, parent: CheckpointResult, *, sha256: str | None = None
) -> CheckpointRequest:
    """The first commit of a fork at the step of `parent`."""
    named = ParentRef(run=RUN, step=parent.commit.step, sha256=sha256 or parent.digest)
    record, _ = read_run(store, RUN)
    digest = create_run(store, record.model_copy(update={"run": "fork", "parent": named}))
    scope = StepScope(run="fork", step=named.step)
    made = Plan(
        run="fork",
        step=named.step,
        kind="fork",
        previous=digest,
        prompts=None,
        shards=[],
        cursor=parent.commit.cursor,
        configs={},
    )
    return CheckpointRequest(
        scope=scope,
        kind="fork",
        plan=adopt_plan(store, made)[1],
        records=[],
        cursor=made.cursor,
        previous=digest,
        metrics={},
        parent=named,
    )


def test_a_fork_begins_with_its_parents_policy_state_and_cursor(store: ObjectStore):
    request, _ = first_step(store, genesis(store))
    parent = run(request, store)
    result = run(fork_request(store, parent), store)
    commit = result.commit
    assert commit.policy == parent.commit.policy
    assert commit.state_id == parent.commit.state_id
    assert commit.cursor == parent.commit.cursor
    assert commit.parent == ParentRef(run=RUN, step=1, sha256=parent.digest)
    assert head(store, "fork") == (commit, result.digest)
    history = [(found.run, found.step) for found, _ in ancestors(store, "fork", 1)]
    assert history == [("fork", 1), (RUN, 1), (RUN, 0)]
    assert [record.run for record in lineage(store, "fork")] == ["fork", RUN]


def test_a_fork_of_another_commit_than_it_names_is_refused(store: ObjectStore):
    request, _ = first_step(store, genesis(store))
    parent = run(request, store)
    with pytest.raises(Corrupt, match="parent's commit of the fork is"):
        run(fork_request(store, parent, sha256="f" * 64), store)
    assert head(store, "fork") is None


def test_history_through_a_changed_parent_is_corrupt(store: ObjectStore):
    request, _ = first_step(store, genesis(store))
    parent = run(request, store)
    run(fork_request(store, parent), store)
    key = commit_key(RUN, 1)
    store.put(key, store.get(key).replace(b'"reward_mean":0.5', b'"reward_mean":0.6'))
    with pytest.raises(Corrupt, match=re.escape(key)):
        list(ancestors(store, "fork", 1))
