"""Whether a step is closed: its records follow from the plan, one another and the step before.

Compares records only; whether bytes are what records name is checked beside this.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from storage.audit_findings import CHAIN, EXACTLY_ONCE, STALENESS, WEIGHT_PROOF, Tally
from storage.layout import StepScope, attempt_key, commit_key, plan_key, record_key, run_key
from storage.ledger import first_step
from storage.records import (
    Cursor,
    ObjectRef,
    Plan,
    PolicyRef,
    RecordRef,
    RunRecord,
    ShardPlan,
    StageRecord,
    StepCommit,
)

SNAPSHOT = "snapshot"
"""The stage of a record that holds trainer state of the step before, made at a graceful stop."""


@dataclass(frozen=True)
class Before:
    """The commit that a step follows: the one before, or for a fork's first one the parent's.

    `is_audited` tells whether its own step is looked at in the same audit.
    """

    commit: StepCommit
    digest: str
    is_audited: bool = True


@dataclass(frozen=True)
class ClosedStep:
    """One committed step as it was read; what could not be read is absent and was said already."""

    run: RunRecord
    run_digest: str
    commit: StepCommit
    before: Before | None
    plan: Plan | None
    records: Mapping[str, StageRecord]
    tally: Tally

    @property
    def scope(self) -> StepScope:
        """The keys of the step."""
        return StepScope(run=self.commit.run, step=self.commit.step)

    @property
    def key(self) -> str:
        """The key of the commit."""
        return commit_key(self.commit.run, self.commit.step)

    def expect(self, name: str, found: object, expected: object, *, promise: int = CHAIN) -> None:
        """Says so if a field of the commit is not what it must be."""
        self.tally.expect(self.key, name, found, expected, promise=promise)

    def ref(self, stage: str) -> RecordRef | None:
        """Returns the commit's reference to the record of a stage."""
        return next((ref for ref in self.commit.records if ref.stage == stage), None)


def check_closure(step: ClosedStep) -> None:
    """Says everything in which the step does not follow from what it says it follows from."""
    _check_kind(step)
    _check_commit(step)
    _check_plan(step)
    _check_stages(step)
    if step.commit.kind == "genesis":
        _check_genesis(step)
    elif step.before is not None:
        _check_state(step, step.before)
        _check_prompts(step, step.before)
        _check_shards(step, step.before)
        _check_train(step, step.before)
        _check_snapshot(step, step.before)


def _check_kind(step: ClosedStep) -> None:
    is_first = step.commit.step == first_step(step.run)
    first_kind = "fork" if step.run.parent else "genesis"
    if is_first:
        step.expect("kind", step.commit.kind, first_kind)
        step.expect("parent", step.commit.parent, step.run.parent)
    else:
        kind = step.commit.kind
        step.expect("kind", kind, kind if kind in ("train", "skipped") else "train or skipped")
        step.expect("parent", step.commit.parent, None)


def _check_commit(step: ClosedStep) -> None:
    commit, before = step.commit, step.before
    step.expect("policy version", commit.policy_version, commit.step)
    step.expect("version of the policy", commit.policy.version, commit.policy_version)
    step.expect("digest of the policy", commit.policy.digest, commit.policy_digest)
    if commit.kind in ("genesis", "fork"):
        _check_link(step, run_key(commit.run), step.run_digest)
    elif before is not None:
        _check_link(step, commit_key(before.commit.run, before.commit.step), before.digest)


def _check_link(step: ClosedStep, earlier: str, digest: str) -> None:
    """Names the one of two links that was changed: the plan is a third witness."""
    commit, plan = step.commit, step.plan
    if plan is not None and plan.previous == digest:
        step.expect(f"previous (the digest of {earlier})", commit.previous, digest)
    elif commit.previous != digest:
        expected = f"digest {commit.previous}, as {step.key} names it"
        step.tally.broken(earlier, expected=expected, found=f"digest {digest}")


def _check_plan(step: ClosedStep) -> None:
    plan, commit, key = step.plan, step.commit, step.commit.plan.key
    if plan is None:
        return
    step.expect("key of the plan", key, plan_key(commit.run, commit.step, plan.revision))
    expected = {
        "run": (plan.run, commit.run),
        "step": (plan.step, commit.step),
        "kind": (plan.kind, commit.kind),
        "previous": (plan.previous, commit.previous),
    }
    for name, (found, wanted) in expected.items():
        step.tally.expect(key, name, found, wanted)
    step.expect("cursor", commit.cursor, plan.cursor, promise=EXACTLY_ONCE)


def _check_stages(step: ClosedStep) -> None:
    """Checks that the commit names the records that its plan asks for, each once."""
    if step.plan is None:
        return
    shards = [f"{shard.index:04d}" for shard in step.plan.shards]
    per_shard = [f"{stage}-{shard}" for stage in ("rollout", "reward") for shard in shards]
    expected = {
        "genesis": ["train"],
        "fork": [],
        "skipped": ["prompts"],
        "train": ["prompts", *per_shard, "train"],
    }[step.commit.kind]
    found = sorted(ref.stage for ref in step.commit.records)
    # One snapshot of the step before may come along.
    extra = [SNAPSHOT] if found.count(SNAPSHOT) == 1 and step.before is not None else []
    step.expect("stages", found, sorted([*expected, *extra]))
    for stage, record in step.records.items():
        if stage != SNAPSHOT:
            ref = step.ref(stage)
            key = record_key(step.scope, stage, record.request_digest)
            step.expect(f"key of the {stage} record", ref.key if ref else None, key)
            _check_places(step, stage, record)


def _check_places(step: ClosedStep, stage: str, record: StageRecord) -> None:
    """Checks that what a record names lies under its own attempt, where nobody else writes."""
    prefix = attempt_key(step.scope, record.attempt, "")
    refs = list(record.outputs.values())
    if record.policy is not None and not _is_carried_on(step, record.policy):
        refs += [*record.policy.files, record.policy.probe]
    if record.snapshot is not None:
        refs += record.snapshot.files.values()
    for ref in refs:
        if not ref.key.startswith(prefix):
            step.expect(f"an object of {stage} under", ref.key, prefix)


def _is_carried_on(step: ClosedStep, policy: PolicyRef) -> bool:
    """Whether a step without an update carries the policy of the step before on."""
    if step.before is None:
        return False
    carried = step.before.commit.policy.model_copy(update={"version": policy.version})
    return policy == carried


def _check_genesis(step: ClosedStep) -> None:
    commit, run = step.commit, step.run
    step.expect("cursor", commit.cursor, Cursor(), promise=EXACTLY_ONCE)
    record = step.records.get("train")
    if record is None:
        return
    expected = {"kind": "genesis", "model": run.model.digest, "weights": run.weights}
    _check_request(step, "train", expected)
    _check_config(step, "train")
    _check_result(step, record)


def _check_result(step: ClosedStep, record: StageRecord) -> None:
    """Checks that the commit takes policy and state from its train record."""
    ref = step.ref("train")
    step.expect("policy", step.commit.policy, record.policy)
    step.expect("state id", step.commit.state_id, ref.sha256 if ref else None)
    step.expect("rebased", step.commit.rebased, record.rebased)


def _check_state(step: ClosedStep, before: Before) -> None:
    """Checks what a step without a train stage carries on."""
    commit = step.commit
    if commit.kind not in ("skipped", "fork"):
        return
    carried = before.commit.policy.model_copy(update={"version": commit.policy_version})
    step.expect("policy, carried on,", commit.policy, carried)
    step.expect("state id", commit.state_id, before.commit.state_id)
    if commit.kind == "fork":
        step.expect("cursor", commit.cursor, before.commit.cursor, promise=EXACTLY_ONCE)
        parent = step.run.parent
        expected = parent.sha256 if parent else None
        earlier = commit_key(before.commit.run, before.commit.step)
        step.tally.expect(earlier, "digest, as the fork names it,", before.digest, expected)


def _check_prompts(step: ClosedStep, before: Before) -> None:
    record, run = step.records.get("prompts"), step.run
    if record is None or step.plan is None:
        return
    step.tally.expect(
        step.commit.plan.key, "prompts record", step.ref("prompts"), step.plan.prompts
    )
    ref = step.ref("prompts")
    cursor = before.commit.cursor.model_dump(mode="json")
    key = ref.key if ref else step.key
    step.tally.expect(key, "cursor", record.request.get("cursor"), cursor, promise=EXACTLY_ONCE)
    inputs = {"mixture": run.prompts.mixture_digest, "train": run.prompts.train.sha256}
    planned = step.plan.configs.get("seed", run.config.get("seed"))
    seed = {} if planned is None else {"seed": str(planned)}
    _check_request(step, "prompts", {**inputs, **seed, **_redo(step.plan)})
    drawn = step.commit.cursor.drawn - before.commit.cursor.drawn
    rows = record.outputs["prompts"].rows if "prompts" in record.outputs else None
    step.tally.expect(key, "number of groups", rows, drawn, promise=EXACTLY_ONCE)


def _check_shards(step: ClosedStep, before: Before) -> None:
    if step.plan is None or step.commit.kind != "train":
        return
    prompts = step.records.get("prompts")
    num_rows = prompts.outputs["prompts"].rows if prompts and prompts.outputs else None
    edge = 0
    for index, shard in enumerate(step.plan.shards):
        _check_shard_plan(step, before, shard, index=index, start=edge)
        _check_rollout(step, shard)
        _check_reward(step, shard)
        edge = shard.stop
    if num_rows is not None:
        key = step.commit.plan.key
        step.tally.expect(key, "rows in shards", edge, num_rows, promise=EXACTLY_ONCE)


def _check_shard_plan(
    step: ClosedStep, before: Before, shard: ShardPlan, *, index: int, start: int
) -> None:
    key, tally = step.commit.plan.key, step.tally
    found = (shard.index, shard.start, shard.stop > shard.start)
    tally.expect(key, "shard, start", found, (index, start, True), promise=EXACTLY_ONCE)
    sampled = (shard.policy_version, shard.policy_digest)
    current = (before.commit.policy_version, before.commit.policy_digest)
    tally.expect(key, f"policy of shard {index}", sampled, current, promise=STALENESS)


def _check_rollout(step: ClosedStep, shard: ShardPlan) -> None:
    assert step.plan is not None
    stage = f"rollout-{shard.index:04d}"
    prompts = _output(step, "prompts", "prompts")
    expected = {
        "rows": [shard.start, shard.stop],
        "sampling": shard.sampling.model_dump(mode="json"),
        "seed": str(shard.seed),
        "policy": shard.policy_digest,
        "model": step.run.model.digest,
        **({"prompts": prompts} if prompts else {}),
        **_redo(step.plan),
    }
    _check_request(step, stage, expected)
    _check_config(step, stage)
    record, ref = step.records.get(stage), step.ref(stage)
    if record is not None and ref is not None:
        policy = step.before.commit.policy if step.before else step.commit.policy
        check_proof(record, policy, key=ref.key, tally=step.tally)


def check_proof(record: StageRecord, policy: PolicyRef, *, key: str, tally: Tally) -> None:
    """Says so if a rollout record does not prove that its engine held `policy` (promise 4).

    Args:
        record: of one rollout shard.
        policy: what the shard had to be sampled from.
        key: of the record.
        tally: counts proofs by kind and keeps the largest difference from the learner.
    """
    proof = record.proof
    if proof is None:
        tally.broken(key, expected="a weight proof", found="none", promise=WEIGHT_PROOF)
        return
    proven, expected = (proof.policy_version, proof.policy_digest), (policy.version, policy.digest)
    tally.expect(key, "proven policy", proven, expected, promise=WEIGHT_PROOF)
    dtype = _config(record).get("dtype")
    is_float32 = (dtype, policy.dtype) == ("float32", "float32")
    if proof.kind == "exact" and not is_float32:
        found = f"exact in {dtype}, {policy.dtype}"
        tally.broken(key, expected="a swap-only proof", found=found, promise=WEIGHT_PROOF)
    difference = proof.max_abs_diff if is_float32 else proof.mean_abs_diff
    if not difference <= proof.tolerance:
        expected_text = f"a difference of at most {proof.tolerance:g} from the learner"
        tally.broken(key, expected=expected_text, found=f"{difference:g}", promise=WEIGHT_PROOF)
    tally.counts[f"proof {proof.kind}"] += 1
    tally.largest("proof difference" if is_float32 else "proof mean difference", difference)
    tally.largest("proof tolerance" if is_float32 else "proof mean tolerance", proof.tolerance)


def _check_reward(step: ClosedStep, shard: ShardPlan) -> None:
    assert step.plan is not None
    stage = f"reward-{shard.index:04d}"
    known = {
        "samples": _output(step, f"rollout-{shard.index:04d}", "samples"),
        "prompts": _output(step, "prompts", "prompts"),
    }
    expected = {name: value for name, value in known.items() if value is not None}
    model = {"model": step.run.model.digest}
    _check_request(step, stage, {**expected, **model, **_redo(step.plan)})
    _check_config(step, stage)


def _check_train(step: ClosedStep, before: Before) -> None:
    record = step.records.get("train")
    if record is None or step.plan is None or step.commit.kind != "train":
        return
    shards = step.plan.shards
    samples = [_output(step, f"rollout-{shard.index:04d}", "samples") for shard in shards]
    rewards = [_output(step, f"reward-{shard.index:04d}", "rewards") for shard in shards]
    expected: dict[str, Any] = {
        "kind": "update",
        "policy": before.commit.policy_digest,
        "state_id": before.commit.state_id,
        "model": step.run.model.digest,
        **({"temperature": shards[0].sampling.temperature} if shards else {}),
        **({"samples": samples} if all(samples) else {}),
        **({"rewards": rewards} if all(rewards) else {}),
        **_redo(step.plan),
    }
    _check_request(step, "train", expected)
    _check_config(step, "train")
    _check_result(step, record)


def _check_snapshot(step: ClosedStep, before: Before) -> None:
    record, ref = step.records.get(SNAPSHOT), step.ref(SNAPSHOT)
    if record is None or ref is None:
        return
    _check_request(step, SNAPSHOT, {"kind": SNAPSHOT, "state_id": before.commit.state_id})
    scope = StepScope(run=before.commit.run, step=before.commit.step)
    key = record_key(scope, SNAPSHOT, record.request_digest)
    step.expect("key of the snapshot record", ref.key, key)


def _output(step: ClosedStep, stage: str, name: str) -> str | None:
    """Returns the digest of an output, or None if it is not known."""
    record = step.records.get(stage)
    ref: ObjectRef | None = record.outputs.get(name) if record else None
    return ref.sha256 if ref else None


def _check_request(step: ClosedStep, stage: str, expected: Mapping[str, Any]) -> None:
    record, ref = step.records.get(stage), step.ref(stage)
    if record is not None and ref is not None:
        for name, value in expected.items():
            step.tally.expect(ref.key, name, record.request.get(name), value)


def _check_config(step: ClosedStep, stage: str) -> None:
    """Checks that a request's config is the plan's, as far as results depend on it."""
    record, ref = step.records.get(stage), step.ref(stage)
    if record is None or ref is None or step.plan is None:
        return
    planned = _as_dict(step.plan.configs.get(stage.partition("-")[0]))
    asked = _config(record)
    for name in asked.keys() & planned.keys():
        expected = _as_far_as_asked(planned[name], asked[name])
        step.tally.expect(ref.key, f"config.{name}", asked[name], expected)


def _as_far_as_asked(planned: Any, asked: Any) -> Any:
    """Returns what is planned without settings that the request leaves out.

    A request leaves out what results do not depend on, and what its stage learnt to do later as
    long as nobody wishes it. Whether it left out more is looked at where facts are.
    """
    if isinstance(planned, list) and isinstance(asked, list):
        items = zip(cast("list[Any]", planned), cast("list[Any]", asked), strict=False)
        rest = cast("list[Any]", planned)[len(cast("list[Any]", asked)) :]
        return [*(_as_far_as_asked(item, other) for item, other in items), *rest]
    if not (isinstance(planned, dict) and isinstance(asked, dict)):
        return planned
    said = cast("dict[str, Any]", asked)
    wanted = cast("dict[str, Any]", planned)
    return {name: _as_far_as_asked(wanted[name], said[name]) for name in wanted if name in said}


def _redo(plan: Plan) -> dict[str, int | None]:
    """Returns the `redo` of a request: none for 0, so that nobody picks among several tries."""
    return {"redo": plan.redo or None}


def _config(record: StageRecord) -> dict[str, Any]:
    return _as_dict(record.request.get("config"))


def _as_dict(found: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
