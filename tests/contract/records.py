"""Small records for the ledger's tests."""

from storage.layout import plan_key
from storage.records import (
    Cursor,
    InputRef,
    ObjectRef,
    Plan,
    PolicyRef,
    PromptInputs,
    RunRecord,
    StageRecord,
    StepCommit,
    request_digest,
)

NOWHERE = ObjectRef(key="k", sha256="0" * 64, num_bytes=0)
POLICY = PolicyRef(version=0, digest="d", dtype="float32", files=[NOWHERE], probe=NOWHERE)


def run_record(run: str = "r", launch_id: str = "launch") -> RunRecord:
    inputs = PromptInputs(mixture_digest="m", sets=[], train=NOWHERE, held_out=NOWHERE)
    return RunRecord(
        run=run,
        launch_id=launch_id,
        config={"steps": 3},
        prompts=inputs,
        model=InputRef(digest="i", files={}),
        weights={"model.safetensors": "5" * 64},
        stop_token_ids=[2],
        created_at="2026-11-29T00:00:00Z",
    )


def plan(step: int, revision: int = 0, reason: str | None = None, run: str = "r") -> Plan:
    return Plan(
        run=run,
        step=step,
        revision=revision,
        kind="train",
        reason=reason,
        previous="p",
        prompts=None,
        shards=[],
        cursor=Cursor(),
        configs={},
    )


def stage_record(
    stage: str = "rollout-0003",
    body: dict[str, object] | None = None,
    attempt: str = "a",
    outputs: dict[str, ObjectRef] | None = None,
) -> StageRecord:
    body = {"seed": "1"} if body is None else body
    return StageRecord(
        stage=stage,
        request=body,
        request_digest=request_digest(stage.partition("-")[0], body),
        outputs=outputs or {},
        attempt=attempt,
        environment={"python": "3.11"},
        environment_digest="e",
    )


def commit(step: int, previous: str, attempt: str = "a", run: str = "r") -> StepCommit:
    return StepCommit(
        run=run,
        step=step,
        kind="genesis" if step == 0 else "train",
        plan=ObjectRef(key=plan_key(run, step, 0), sha256="0" * 64, num_bytes=1),
        records=[],
        policy_version=step,
        policy_digest="d",
        policy=POLICY,
        state_id="s",
        cursor=Cursor(),
        metrics={"reward_mean": 0.5},
        previous=previous,
        attempt=attempt,
        committed_at="2026-11-29T00:00:00Z",
    )
