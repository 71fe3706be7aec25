"""Writes a run that no engine made: every record and object as a real one has them, tiny."""

import struct
from dataclasses import dataclass
from typing import Any

from storage.layout import EvalScope, StepScope, attempt_key, input_key
from storage.ledger import (
    adopt_plan,
    create_run,
    put_commit,
    put_eval,
    put_record,
    read_record,
)
from storage.object_store import ObjectStore
from storage.objects import put_object
from storage.records import (
    Cursor,
    EvalRecord,
    InputRef,
    ObjectRef,
    ParentRef,
    Plan,
    PolicyRef,
    Probe,
    PromptInputs,
    PromptSet,
    RecordRef,
    RunRecord,
    SamplingPolicy,
    SetCursor,
    ShardPlan,
    SnapshotRef,
    StageRecord,
    StepCommit,
    WeightProof,
    canonical_json,
    input_digest,
    request_digest,
    sha256_hex,
)
from storage.signing import Signer, sign_commit

GROUPS = 4
SHARDS = 2
SAMPLING = SamplingPolicy(group_size=2, temperature=1.0, max_tokens=5, stop_token_ids=[1])
PROBE = Probe(token_ids=[[1, 2]], logprobs=[[None, -0.5]], next_token_ids=[1], next_logprobs=[-0.5])
JUDGE = {"kind": "judge", "options": {"url": "http://judge"}}
BUSY_JUDGE = {"kind": "judge", "options": {"url": "http://judge", "concurrency": 4}}
CONFIGS: dict[str, dict[str, Any]] = {
    "rollout": {"dtype": "float32", "python": None},
    "reward": {"workers": 2, "cpu_limit_s": 5.0, "parts": [BUSY_JUDGE]},
    "train": {"learning_rate": 0.1, "python": None},
}
ASKED: dict[str, dict[str, Any]] = {
    "rollout": {"dtype": "float32"},
    "reward": {"cpu_limit_s": 5.0, "parts": [JUDGE]},
    "train": {"learning_rate": 0.1},
}


@dataclass
class Head:
    """The end of a run while it is written."""

    run: RunRecord
    run_digest: str
    commit: StepCommit
    digest: str


def write_run(
    store: ObjectStore,
    steps: int,
    *,
    run: str = "made",
    snapshot_every: int = 2,
    evals: tuple[int, ...] = (),
    skipped: tuple[int, ...] = (),
    signer: Signer | None = None,
    **fields: Any,
) -> Head:
    """Writes genesis and `steps` steps; evaluates the versions in `evals`.

    `fields` replace those of run.json.
    """
    record = _run_record(store, run).model_copy(update=fields)
    digest = create_run(store, record)
    head = _genesis(store, record, digest, signer)
    for step in range(1, steps + 1):
        head = next_step(
            store, head, snapshot=step % snapshot_every == 0, skip=step in skipped, signer=signer
        )
        if step in evals:
            write_eval(store, head)
    return head


def write_fork(store: ObjectStore, parent: Head, *, run: str, steps: int) -> Head:
    """Writes a fork that left from `parent` and goes on for `steps` steps."""
    origin = ParentRef(run=parent.run.run, step=parent.commit.step, sha256=parent.digest)
    record = parent.run.model_copy(update={"run": run, "parent": origin})
    digest = create_run(store, record)
    before = parent.commit
    plan = _plan(before.step, "fork", digest, before.cursor, run=run)
    commit = _commit(
        store, run, before.step, "fork", plan, [], before.policy, before.state_id, digest, origin
    )
    stands, sha256, _ = put_commit(store, commit)
    head = Head(record, digest, stands, sha256)
    for _ in range(steps):
        head = next_step(store, head)
    return head


def next_step(
    store: ObjectStore,
    head: Head,
    *,
    snapshot: bool = False,
    skip: bool = False,
    stopped: RecordRef | None = None,
    signer: Signer | None = None,
) -> Head:
    """Writes one more step, which names the snapshot of a stop before it if there was one."""
    before, step = head.commit, head.commit.step + 1
    scope = StepScope(run=head.run.run, step=step)
    prompts = _prompts(store, scope, head)
    cursor = Cursor(
        drawn=before.cursor.drawn + GROUPS,
        sets={"set": SetCursor(position=before.cursor.drawn + GROUPS)},
    )
    kind = "skipped" if skip else "train"
    shards = [] if skip else [_shard(index, before) for index in range(SHARDS)]
    plan = _plan(step, kind, head.digest, cursor, run=head.run.run, prompts=prompts[0])
    plan = plan.model_copy(update={"shards": shards, "reason": "asked for" if skip else None})
    if skip:
        policy = before.policy.model_copy(update={"version": step})
        refs, state_id = [prompts[0]], before.state_id
    else:
        refs, policy = _stages(store, scope, head, plan, prompts[1], snapshot=snapshot)
        refs, state_id = [prompts[0], *refs], refs[-1].sha256
    refs += [stopped] if stopped else []
    commit = _commit(
        store, head.run.run, step, kind, plan, refs, policy, state_id, head.digest, None
    )
    stands, digest, _ = put_commit(store, sign_commit(commit, signer) if signer else commit)
    return Head(head.run, head.run_digest, stands, digest)


def open_step(
    store: ObjectStore, head: Head, *, configs: dict[str, Any]
) -> tuple[Plan, ObjectRef, list[ObjectRef], list[ObjectRef]]:
    """Plans, samples and grades the step after `head`; returns plan, prompts, samples, rewards."""
    before, step = head.commit, head.commit.step + 1
    scope = StepScope(run=head.run.run, step=step)
    ref, _ = _prompts(store, scope, head)
    cursor = Cursor(drawn=before.cursor.drawn + GROUPS)
    plan = _plan(step, "train", head.digest, cursor, run=head.run.run, prompts=ref)
    shards = [_shard(index, before) for index in range(SHARDS)]
    plan, _ = adopt_plan(store, plan.model_copy(update={"shards": shards, "configs": configs}))
    samples: list[ObjectRef] = []
    rewards: list[ObjectRef] = []
    for index in range(SHARDS):
        for stage, output, found in (
            ("rollout", "samples", samples),
            ("reward", "rewards", rewards),
        ):
            name = f"{stage}-{index:04d}"
            shard = _put(store, scope, f"{name}.parquet", f"{name} {step}".encode(), rows=4)
            _record(store, scope, name, {"shard": index}, {output: shard})
            found.append(shard)
    return plan, read_record(store, ref).outputs["prompts"], samples, rewards


def write_stop(store: ObjectStore, head: Head) -> RecordRef:
    """Writes the snapshot that a graceful stop leaves under the newest step."""
    scope = StepScope(run=head.run.run, step=head.commit.step)
    body = {"kind": "snapshot", "state_id": head.commit.state_id}
    return _record(store, scope, "snapshot", body, {}, None, _snapshot(store, scope))


def write_eval(store: ObjectStore, head: Head) -> EvalRecord:
    """Evaluates the newest version of a run."""
    commit, run = head.commit, head.run
    scope = EvalScope(run=run.run, version=commit.policy_version, suite="held_out")
    prompts = run.prompts.held_out.sha256
    sampled, samples = _sampled(
        store,
        scope,
        0,
        {"prompts": prompts, "policy": commit.policy_digest, "rows": [0, 8]},
        run,
        commit,
    )
    body = {"samples": samples, "prompts": prompts, "model": run.model.digest}
    rewards = _put(store, scope, "reward-0000.parquet", b"rewards of the evaluation", rows=2)
    graded = _record(store, scope, "reward-0000", body, {"rewards": rewards})
    return put_eval(
        store,
        EvalRecord(
            run=run.run,
            suite="held_out",
            policy_version=commit.policy_version,
            policy_digest=commit.policy_digest,
            records=[sampled, graded],
            num_prompts=1,
            num_samples=2,
            num_graded=2,
            accuracy=0.5,
            low=0.1,
            high=0.9,
            reward_mean=0.5,
            metrics={},
        ),
    )


def safetensors(text: str) -> bytes:
    """A safetensors file of two tensors that hold `text`."""
    half = text.encode().ljust(16)[:16]
    entries = {
        name: {"dtype": "U8", "shape": [16], "data_offsets": [start, start + 16]}
        for name, start in (("b.weight", 0), ("a.weight", 16))
    }
    header = canonical_json({"__metadata__": {"format": "pt"}, **entries})
    return struct.pack("<Q", len(header)) + header + half + half[::-1]


def safetensors_digest(text: str) -> str:
    """The policy digest of that file."""
    half = text.encode().ljust(16)[:16]
    rows = [
        ["a.weight", "U8", [16], sha256_hex(half[::-1])],
        ["b.weight", "U8", [16], sha256_hex(half)],
    ]
    return sha256_hex(canonical_json(rows))


def _run_record(store: ObjectStore, run: str) -> RunRecord:
    files = {"config.json": b'{"vocab_size": 16}', "tokenizer.json": b"{}"}
    shards = {"train.parquet": b"the training prompts", "held_out.parquet": b"held out"}
    model, model_digest = _inputs(store, files, rows=None)
    prompts, _ = _inputs(store, shards, rows=8)
    return RunRecord(
        run=run,
        launch_id="launch",
        config={"seed": 7, "steps": 3},
        prompts=PromptInputs(
            mixture_digest="m" * 64,
            sets=[PromptSet(name="set", weight=1.0, train_rows=8, held_out_rows=8, dropped={})],
            train=prompts["train.parquet"],
            held_out=prompts["held_out.parquet"],
        ),
        model=InputRef(digest=model_digest, files=model),
        weights={"model.safetensors": "5" * 64},
        stop_token_ids=[1],
        created_at="2026-11-29T00:00:00Z",
    )


def _inputs(
    store: ObjectStore, files: dict[str, bytes], *, rows: int | None
) -> tuple[dict[str, ObjectRef], str]:
    digest = input_digest({name: sha256_hex(payload) for name, payload in files.items()})
    refs = {
        name: put_object(store, input_key(digest, name), payload, rows=rows)
        for name, payload in files.items()
    }
    return refs, digest


def _genesis(store: ObjectStore, run: RunRecord, digest: str, signer: Signer | None) -> Head:
    scope = StepScope(run=run.run, step=0)
    body = {"kind": "genesis", "model": run.model.digest, "weights": run.weights}
    policy = _policy(store, scope, 0)
    ref = _record(
        store,
        scope,
        "train",
        {**body, "config": ASKED["train"]},
        {},
        policy,
        _snapshot(store, scope),
    )
    plan = _plan(0, "genesis", digest, Cursor(), run=run.run)
    commit = _commit(store, run.run, 0, "genesis", plan, [ref], policy, ref.sha256, digest, None)
    stands, sha256, _ = put_commit(store, sign_commit(commit, signer) if signer else commit)
    return Head(run, digest, stands, sha256)


def _prompts(store: ObjectStore, scope: StepScope, head: Head) -> tuple[RecordRef, str]:
    run, before = head.run, head.commit
    body = {
        "seed": "7",
        "mixture": run.prompts.mixture_digest,
        "train": run.prompts.train.sha256,
        "cursor": before.cursor.model_dump(mode="json"),
        "round": 0,
        "num_groups": GROUPS,
    }
    shard = _put(store, scope, "prompts.parquet", f"prompts {scope.step}".encode(), rows=GROUPS)
    return _record(store, scope, "prompts", body, {"prompts": shard}), shard.sha256


def _shard(index: int, before: StepCommit) -> ShardPlan:
    size = GROUPS // SHARDS
    return ShardPlan(
        index=index,
        start=index * size,
        stop=(index + 1) * size,
        sampling=SAMPLING,
        policy_version=before.policy_version,
        policy_digest=before.policy_digest,
        seed=11,
    )


def _stages(
    store: ObjectStore, scope: StepScope, head: Head, plan: Plan, prompts: str, *, snapshot: bool
) -> tuple[list[RecordRef], PolicyRef]:
    before, run = head.commit, head.run
    rollouts: list[RecordRef] = []
    rewards: list[RecordRef] = []
    samples: list[str] = []
    graded: list[str] = []
    for shard in plan.shards:
        body = {
            "prompts": prompts,
            "rows": [shard.start, shard.stop],
            "sampling": SAMPLING.model_dump(mode="json"),
            "seed": "11",
            "policy": shard.policy_digest,
        }
        ref, sampled = _sampled(store, scope, shard.index, body, run, before)
        rollouts.append(ref)
        samples.append(sampled)
        said = _put(
            store,
            scope,
            f"reward-{shard.index:04d}.parquet",
            f"rewards {scope.step} {shard.index}".encode(),
            rows=4,
        )
        body = {
            "samples": sampled,
            "prompts": prompts,
            "model": run.model.digest,
            "config": ASKED["reward"],
        }
        rewards.append(_record(store, scope, f"reward-{shard.index:04d}", body, {"rewards": said}))
        graded.append(said.sha256)
    body = {
        "kind": "update",
        "samples": samples,
        "rewards": graded,
        "policy": before.policy_digest,
        "state_id": before.state_id,
        "temperature": 1.0,
        "update_index": scope.step - 1,
        "model": run.model.digest,
        "config": ASKED["train"],
    }
    policy = _policy(store, scope, scope.step)
    rows = _put(store, scope, "train.parquet", f"train {scope.step}".encode(), rows=8)
    state = _snapshot(store, scope) if snapshot else None
    trained = _record(store, scope, "train", body, {"train": rows}, policy, state)
    return [*rollouts, *rewards, trained], policy


def _sampled(
    store: ObjectStore,
    scope: StepScope | EvalScope,
    index: int,
    body: dict[str, Any],
    run: RunRecord,
    before: StepCommit,
) -> tuple[RecordRef, str]:
    where = scope.prefix.rpartition("/")[2]
    payload = f"samples {where} {scope.kind} {index}".encode()
    shard = _put(store, scope, f"rollout-{index:04d}.parquet", payload, rows=4)
    proof = WeightProof(
        kind="exact",
        policy_version=before.policy_version,
        policy_digest=before.policy_digest,
        max_abs_diff=1e-5,
        mean_abs_diff=1e-6,
        tolerance=1e-3,
        num_tokens=2,
    )
    asked = {**body, "model": run.model.digest, "config": ASKED["rollout"]}
    stage = f"rollout-{index:04d}"
    return _record(store, scope, stage, asked, {"samples": shard}, proof=proof), shard.sha256


def _policy(store: ObjectStore, scope: StepScope, version: int) -> PolicyRef:
    text = f"policy {version}"
    return PolicyRef(
        version=version,
        digest=safetensors_digest(text),
        dtype="float32",
        files=[_put(store, scope, "policy/model.safetensors", safetensors(text))],
        probe=_put(store, scope, "probe.json", PROBE.to_bytes()),
    )


def _snapshot(store: ObjectStore, scope: StepScope) -> SnapshotRef:
    name = "state-00001-of-00001.safetensors"
    file = _put(store, scope, f"snapshot/{name}", f"state {scope.step}".encode())
    return SnapshotRef(files={name: file}, ranks=1, zero_stage=2)


def _put(
    store: ObjectStore,
    scope: StepScope | EvalScope,
    name: str,
    payload: bytes,
    *,
    rows: int | None = None,
) -> ObjectRef:
    return put_object(store, attempt_key(scope, "attempt", name), payload, rows=rows)


def _record(
    store: ObjectStore,
    scope: StepScope | EvalScope,
    stage: str,
    body: dict[str, Any],
    outputs: dict[str, ObjectRef],
    policy: PolicyRef | None = None,
    snapshot: SnapshotRef | None = None,
    *,
    proof: WeightProof | None = None,
) -> RecordRef:
    made = StageRecord(
        stage=stage,
        request=body,
        request_digest=request_digest(stage.partition("-")[0], body),
        outputs=outputs,
        policy=policy,
        snapshot=snapshot,
        proof=proof,
        attempt="attempt",
        environment={"python": "3.11"},
        environment_digest="e",
    )
    return put_record(store, scope, made)[1]


def _plan(
    step: int,
    kind: Any,
    previous: str,
    cursor: Cursor,
    *,
    run: str,
    prompts: RecordRef | None = None,
) -> Plan:
    return Plan(
        run=run,
        step=step,
        kind=kind,
        previous=previous,
        prompts=prompts,
        shards=[],
        cursor=cursor,
        configs=CONFIGS,
    )


def _commit(
    store: ObjectStore,
    run: str,
    step: int,
    kind: Any,
    plan: Plan,
    records: list[RecordRef],
    policy: PolicyRef,
    state_id: str,
    previous: str,
    parent: ParentRef | None,
) -> StepCommit:
    return StepCommit(
        run=run,
        step=step,
        kind=kind,
        plan=adopt_plan(store, plan)[1],
        records=records,
        policy_version=policy.version,
        policy_digest=policy.digest,
        policy=policy,
        state_id=state_id,
        cursor=plan.cursor,
        metrics={"reward_mean": 0.5},
        previous=previous,
        parent=parent,
        attempt="attempt",
        committed_at="2026-11-29T00:00:00Z",
    )
