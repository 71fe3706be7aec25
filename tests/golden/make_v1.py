"""Made the files of `v1/`, once, when schema version 1 was released. They are never made again.

`python -m tests.golden.make_v1 FOLDER` writes what this version writes for the same rows, to be
compared by hand when `test_golden_v1.py` fails. The Parquet files were made with pyarrow 26.0.1.
A new schema version gets a script and a folder of its own.
"""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage.experience import encode_shard, rows_to_table
from storage.layout import StepScope, attempt_key, plan_key, record_key
from storage.records import (
    Cursor,
    EvalRecord,
    GcRecord,
    GivenUp,
    InputRef,
    ObjectRef,
    ParentRef,
    Plan,
    PolicyRef,
    Probe,
    PromptInputs,
    PromptSet,
    Rebase,
    Record,
    RecordRef,
    RunRecord,
    SamplingPolicy,
    SetCursor,
    ShardPlan,
    SnapshotRef,
    StageRecord,
    StepCommit,
    WeightProof,
    request_digest,
    sha256_hex,
)
from storage.schemas import PROMPTS, REWARDS, SAMPLES, TRAIN
from storage.signing import Signer, sign_commit

RUN = "golden"
SCOPE = StepScope(run=RUN, step=3)
SIGNER = Signer.from_private_bytes(bytes(range(32)))
"""A key for tests; ed25519 signs the same bytes the same way each time."""
ODD = "a\x00b \u202e reversed \U0001f600"


PARENT = ParentRef(run="before", step=2, sha256="8" * 64)
REBASED = Rebase(steps=[2, 3], num_elements=17, max_abs_diff=3e-7, share=0.0125, was="e1", now="e2")


def prompt_rows() -> list[dict[str, Any]]:
    """Two groups, one without an answer."""
    return [
        {
            "prompt_id": f"addition/{index}",
            "group_id": f"g{index}",
            "domain": "addition",
            "prompt_token_ids": [3, 7, 40 + index],
            "answer": answer,
            "extra": f'{{"row":{index}}}',
        }
        for index, answer in enumerate(["58", None])
    ]


def sample_rows() -> list[dict[str, Any]]:
    """A stopped, a truncated and an empty completion; a masked token; two versions in one."""
    completions = [([5, 8, 2], [-0.25, -12.34, -12.3]), ([9, 9], [-1.5, None]), ([], [])]
    return [
        {
            "sample_id": f"g0/{index}",
            "group_id": "g0",
            "sample_index": index,
            "prompt_token_ids": [3, 7, 40],
            "completion_token_ids": ids,
            "completion_mask": [logprob is not None for logprob in logprobs],
            "rollout_logprobs": logprobs,
            "finish_reason": "stop" if index == 0 else "length",
            "stop_token_id": 2 if index == 0 else None,
            "seed": 2**62 + index,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "max_tokens": 5,
            "version_spans": [
                {"start": 0, "policy_version": 2, "policy_digest": "d2"},
                {"start": 1, "policy_version": 3, "policy_digest": "d3"},
            ],
        }
        for index, (ids, logprobs) in enumerate(completions)
    ]


def reward_rows() -> list[dict[str, Any]]:
    """Graded, timed out, and without parts."""
    part = {"name": "exact", "value": 1.0, "weight": 1.0, "status": "graded", "reason": None}
    late = part | {"value": None, "status": "grader_timeout", "reason": ODD}
    return [
        {"sample_id": "g0/0", "reward": 1.0, "status": "graded", "reason": None, "parts": [part]},
        {
            "sample_id": "g0/1",
            "reward": None,
            "status": "grader_timeout",
            "reason": ODD,
            "parts": [part, late],
        },
        {
            "sample_id": "g0/2",
            "reward": None,
            "status": "not_applicable",
            "reason": "",
            "parts": [],
        },
    ]


def train_rows() -> list[dict[str, Any]]:
    """Kept and dropped."""
    kept = {"advantage": 0.5, "kept": True, "reason": None, "learner_logprobs": [-0.25, -12.25]}
    dropped = {"advantage": None, "kept": False, "reason": "grader_timeout"}
    rows = [kept, dropped | {"learner_logprobs": None}, dropped | {"learner_logprobs": []}]
    return [row | {"sample_id": f"g0/{i}", "group_id": "g0"} for i, row in enumerate(rows)]


SHARDS: dict[str, tuple[list[dict[str, Any]], pa.Schema]] = {
    "prompts.parquet": (prompt_rows(), PROMPTS),
    "samples.parquet": (sample_rows(), SAMPLES),
    "rewards.parquet": (reward_rows(), REWARDS),
    "train.parquet": (train_rows(), TRAIN),
}


def ref(name: str, rows: int | None = None) -> ObjectRef:
    """A reference whose digest is the name's."""
    digest = sha256_hex(name.encode())
    return ObjectRef(key=attempt_key(SCOPE, "7f3a", name), sha256=digest, num_bytes=10, rows=rows)


def make_records() -> dict[str, Record]:
    """Every record of the store, every field filled."""
    sampling = SamplingPolicy(group_size=8, temperature=1.0, max_tokens=5, stop_token_ids=[2])
    cursor = Cursor(drawn=192, sets={"addition": SetCursor(epoch=1, position=64, deferred=[5])})
    policy = PolicyRef(
        version=4,
        digest="d4",
        dtype="bfloat16",
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        files=[ref("policy/model-00001-of-00001.safetensors")],
        probe=ref("probe.json"),
    )
    body = {"kind": "update", "learning_rate": 1e-06, "samples": ["s"], "seed": str(2**63 - 1)}
    train = StageRecord(
        stage="train",
        request=body,
        request_digest=request_digest("train", body),
        outputs={"train": ref("train.parquet", rows=3)},
        policy=policy,
        snapshot=SnapshotRef(files={"rank-0.pt": ref("rank-0.pt")}, ranks=1, zero_stage=2),
        state_digest="sd",
        proof=WeightProof(
            kind="exact",
            policy_version=3,
            policy_digest="d3",
            max_abs_diff=3e-5,
            mean_abs_diff=1e-6,
            tolerance=1e-4,
            num_tokens=256,
        ),
        rebased=REBASED,
        attempt="7f3a",
        environment={"python": "3.11.7", "package:torch": "2.13.0+cpu"},
        environment_digest="e",
        timings_s={"update": 0.25},
        metrics={"loss": None, "grad_norm": 1.5},
        notes=[ODD],
    )
    train_ref = RecordRef(
        stage="train",
        key=record_key(SCOPE, "train", train.request_digest),
        sha256=train.content_digest(),
        request_digest=train.request_digest,
    )
    plan = Plan(
        run=RUN,
        step=3,
        revision=1,
        kind="train",
        reason="NaN in loss",
        redo=1,
        previous="p",
        prompts=train_ref,
        shards=[
            ShardPlan(
                index=0,
                start=0,
                stop=64,
                sampling=sampling,
                policy_version=3,
                policy_digest="d3",
                seed=2**63 - 1,
            )
        ],
        cursor=cursor,
        configs={"train": {"learning_rate": 5e-4}},
    )
    plan_ref = ObjectRef(
        key=plan_key(RUN, 3, 1), sha256=plan.content_digest(), num_bytes=len(plan.to_bytes())
    )
    commit = StepCommit(
        run=RUN,
        step=3,
        kind="train",
        plan=plan_ref,
        records=[train_ref],
        policy_version=4,
        policy_digest="d4",
        policy=policy,
        state_id=train_ref.sha256,
        cursor=cursor,
        metrics={"reward_mean": 0.375, "kl": None},
        previous="p",
        parent=PARENT,
        rebased=REBASED,
        attempt="7f3a",
        committed_at="2026-11-29T22:00:00Z",
    )
    return {
        "run.json": make_run(),
        "plan.json": plan,
        "record.json": train,
        "commit.json": commit,
        "signed-commit.json": sign_commit(commit, SIGNER),
        "eval.json": make_eval(train_ref),
        "gc.json": make_gc(),
        "probe.json": Probe(
            token_ids=[[1, 2]],
            logprobs=[[None, -0.5]],
            next_token_ids=[3],
            next_logprobs=[-1.25],
        ),
    }


def make_run() -> RunRecord:
    """The run."""
    return RunRecord(
        run=RUN,
        launch_id="l1",
        config={"recipe": "addition", "train": {"learning_rate": 5e-4}, "text": ODD},
        prompts=PromptInputs(
            mixture_digest="m",
            sets=[
                PromptSet(
                    name="addition",
                    weight=1.0,
                    train_rows=7300,
                    held_out_rows=800,
                    dropped={"too_long": 2},
                )
            ],
            train=ref("train-prompts.parquet", rows=7300),
            held_out=ref("held-out-prompts.parquet", rows=800),
        ),
        model=InputRef(digest="i", files={"tokenizer.json": ref("tokenizer.json")}),
        weights={"model.safetensors": "5" * 64},
        stop_token_ids=[2],
        parent=PARENT,
        created_at="2026-11-29T22:00:00Z",
    )


def make_eval(record: RecordRef) -> EvalRecord:
    """An evaluation."""
    return EvalRecord(
        run=RUN,
        suite="held-out",
        policy_version=4,
        policy_digest="d4",
        records=[record],
        num_prompts=800,
        num_samples=800,
        num_graded=799,
        accuracy=0.875,
        low=0.85,
        high=0.9,
        reward_mean=0.875,
        metrics={"tokens_mean": 3.5},
    )


def make_gc() -> GcRecord:
    """What gc gave up: a policy's file, and a leftover whose digest nobody knows."""
    return GcRecord(
        run=RUN,
        head=40,
        rule={"policies_last": 2, "policies_every": 20, "pinned": [7]},
        objects=[
            GivenUp(
                key=attempt_key(SCOPE, "7f3a", "policy/model.safetensors"),
                kind="policy",
                num_bytes=10,
                sha256="9" * 64,
                why="none of the last 2, of every 20, or pinned",
            ),
            GivenUp(
                key=attempt_key(SCOPE, "b210", "train.parquet"),
                kind="unreferenced",
                num_bytes=3,
                why="no commit names it",
            ),
        ],
        attempt="c0de",
        created_at="2026-11-30T01:00:00+00:00",
    )


def encode_all() -> dict[str, bytes]:
    """Returns the bytes of every golden file."""
    shards = {
        name: encode_shard(rows_to_table(rows, schema=schema), schema=schema)
        for name, (rows, schema) in SHARDS.items()
    }
    return shards | {name: record.to_bytes() for name, record in make_records().items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, payload in encode_all().items():
        (folder / file_name).write_bytes(payload)
