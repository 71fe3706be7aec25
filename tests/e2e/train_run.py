"""A run made by hand: stage records and commits as the flow would put them, without the flow."""

import random
from collections.abc import Sequence
from pathlib import Path

from storage.experience import rows_to_table, write_shard
from storage.layout import StepScope, attempt_key
from storage.ledger import adopt_plan, create_run, head, put_commit, put_record, record_ref
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import (
    Cursor,
    InputRef,
    ObjectRef,
    Plan,
    PolicyRef,
    PromptInputs,
    RecordRef,
    RunRecord,
    StageRecord,
    StepCommit,
    request_digest,
    sha256_hex,
)
from storage.schemas import REWARDS, SAMPLES
from storage.store_config import StoreConfig
from tasks.train.contract import GenesisRequest, TrainConfig, TrainRequest

RUN = "hand-made"
MODEL = InputRef(digest="model", files={})
NOTHING = ObjectRef(key="nothing", sha256="0" * 64, num_bytes=0)


def new_run(directory: Path) -> ObjectStore:
    """Returns a store that holds a run without commits."""
    store = open_store(StoreConfig(uri=str(directory)), writing=True)
    prompts = PromptInputs(mixture_digest="m", sets=[], train=NOTHING, held_out=NOTHING)
    create_run(
        store,
        RunRecord(
            run=RUN,
            launch_id="launch",
            config={},
            prompts=prompts,
            model=MODEL,
            weights={"model.safetensors": "5" * 64},
            stop_token_ids=[1],
            created_at="2026-01-01",
        ),
    )
    return store


def genesis_request(model_dir: Path, config: TrainConfig) -> GenesisRequest:
    files = sorted(model_dir.glob("*.safetensors"))
    return GenesisRequest(
        scope=StepScope(run=RUN, step=0),
        model=MODEL,
        weights={path.name: sha256_hex(path.read_bytes()) for path in files},
        model_dir=str(model_dir),
        seed=7,
        config=config,
    )


def train_request(
    store: ObjectStore,
    config: TrainConfig,
    *,
    rewards: Sequence[float | None] | None = None,
    snapshot_due: bool = False,
) -> tuple[TrainRequest, list[RecordRef]]:
    """Returns the request of the step after the head, and the records of its experience."""
    found = head(store, RUN)
    assert found is not None
    commit = found[0]
    scope = StepScope(run=RUN, step=commit.step + 1)
    samples = _shard(store, scope, "rollout-0000", SAMPLES, sample_rows(scope.step))
    rows = reward_rows(scope.step, rewards)
    graded = _shard(store, scope, "reward-0000", REWARDS, rows)
    request = TrainRequest(
        scope=scope,
        samples=[samples[0]],
        rewards=[graded[0]],
        prompts=NOTHING,
        policy=commit.policy,
        state_id=commit.state_id,
        temperature=1.0,
        update_index=commit.step * config.epochs * config.minibatches,
        model=MODEL,
        config=config,
        snapshot_due=snapshot_due,
    )
    return request, [samples[1], graded[1]]


def sample_rows(step: int, *, groups: int = 4, size: int = 4) -> list[dict]:
    draw = random.Random(step)
    rows = []
    for group in range(groups):
        prompt = [draw.randrange(2, 32) for _ in range(4)]
        for index in range(size):
            cut = draw.random() < 0.25
            tokens = [draw.randrange(2, 32) for _ in range(draw.randrange(1, 6))]
            tokens = tokens if cut else [*tokens, 1]
            rows.append(
                {
                    "sample_id": f"{step}/{group}/{index}",
                    "group_id": f"{step}/{group}",
                    "sample_index": index,
                    "prompt_token_ids": prompt,
                    "completion_token_ids": tokens,
                    "completion_mask": [True] * len(tokens),
                    "rollout_logprobs": [-3.0] * len(tokens),
                    "finish_reason": "length" if cut else "stop",
                    "stop_token_id": None if cut else 1,
                    "seed": group * size + index,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": 0,
                    "max_tokens": 6,
                    "version_spans": [],
                }
            )
    return rows


def reward_rows(step: int, rewards: Sequence[float | None] | None) -> list[dict]:
    draw = random.Random(step + 1000)
    given = rewards or [float(draw.random() < 0.5) for _ in range(16)]
    return [
        {
            "sample_id": row["sample_id"],
            "reward": reward,
            "status": "graded" if reward is not None else "grader_timeout",
            "reason": None,
            "parts": [],
        }
        for row, reward in zip(sample_rows(step), given, strict=True)
    ]


def _shard(store, scope, stage, schema, rows) -> tuple[ObjectRef, RecordRef]:
    name = {"rollout-0000": "samples", "reward-0000": "rewards"}[stage]
    key = attempt_key(scope, "hand", f"{name}.parquet")
    shard = write_shard(store, rows_to_table(rows, schema=schema), schema=schema, key=key)
    body = {"made": "by hand", "shard": shard.sha256}
    record = StageRecord(
        stage=stage,
        request=body,
        request_digest=request_digest(stage.partition("-")[0], body),
        outputs={name: shard},
        attempt="hand",
        environment={},
        environment_digest="",
    )
    return shard, put_record(store, scope, record)[1]


def commit(store: ObjectStore, trained: StageRecord, records: Sequence[RecordRef]) -> StepCommit:
    """Commits a step whose train stage gave `trained`."""
    found = head(store, RUN)
    step = found[0].step + 1 if found else 0
    scope = StepScope(run=RUN, step=step)
    kind = "train" if found else "genesis"
    previous = found[1] if found else sha256_hex(store.get(f"runs/{RUN}/run.json"))
    plan = Plan(
        run=RUN,
        step=step,
        kind=kind,
        previous=previous,
        prompts=None,
        shards=[],
        cursor=Cursor(),
        configs={},
    )
    ref = record_ref(scope, trained, store=store)
    policy: PolicyRef | None = trained.policy
    assert policy is not None
    made = StepCommit(
        run=RUN,
        step=step,
        kind=kind,
        plan=adopt_plan(store, plan)[1],
        records=[*records, ref],
        policy_version=policy.version,
        policy_digest=policy.digest,
        policy=policy,
        state_id=ref.sha256,
        cursor=Cursor(),
        metrics={},
        previous=previous,
        attempt="hand",
        committed_at="2026-01-01",
    )
    return put_commit(store, made)[0]
