"""One RL step as one flow run: plan, rollout, reward, train, checkpoint."""

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefect import flow
from prefect.futures import PrefectFuture, as_completed
from prefect.runtime import flow_run

from flows.config import optimizer_updates, stage_configs
from flows.metrics import step_metrics
from flows.session import Session, session_of
from storage.layout import StepScope
from storage.ledger import adopt_plan, current_plan, read_commit, read_record, record_ref
from storage.records import (
    ObjectRef,
    Plan,
    PolicyRef,
    SamplingPolicy,
    ShardPlan,
    StageRecord,
    StepCommit,
)
from tasks.checkpoint.contract import CheckpointRequest, CheckpointResult
from tasks.checkpoint.task import checkpoint
from tasks.errors import Permanent, Transient
from tasks.prompts.contract import PromptsRequest
from tasks.prompts.task import prompts
from tasks.reward.contract import RewardConfig, RewardRequest, RewardResult
from tasks.reward.task import reward
from tasks.rollout.contract import (
    LoadRequest,
    LoadResult,
    RolloutConfig,
    RolloutRequest,
    RolloutResult,
)
from tasks.rollout.task import rollout
from tasks.train.contract import TrainConfig, TrainRequest
from tasks.train.task import train

log = logging.getLogger(__name__)


@dataclass
class Laps:
    """Wall seconds from one stage's end to the next, as the step saw them."""

    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    def end(self, stage: str) -> None:
        """Books the time since the last lap under `stage`."""
        now = time.monotonic()
        self.seconds[f"{stage}_s"] = now - self.began
        self.began = now


@flow(name="step", flow_run_name="step {step}", persist_result=False, validate_parameters=False)
def step(run: str, step: int) -> None:
    """Makes step `step` of `run` exist, whatever of it is there already.

    Raises:
        Permanent: a stage cannot succeed; nothing was committed.
        Transient: a stage failed more often than its task retries.
    """
    session = session_of(run)
    scope = StepScope(run=run, step=step)
    laps = Laps()
    session.watcher.stage(step, "plan")
    plan, plan_ref = plan_step(session, scope)
    assert plan.prompts is not None, "only genesis has no prompts"
    prompts_record = read_record(session.store, plan.prompts)
    laps.end("plan")
    rollouts, rewards = _sample_and_grade(session, scope, plan, prompts_record, laps)
    session.watcher.stage(step, "train")
    request = _train_request(session, scope, plan, prompts_record, rollouts, rewards)
    trained = train(request, session.stages.train)
    laps.end("train")
    load_ahead(session, trained.record.policy, plan)
    session.watcher.stage(step, "checkpoint")
    records = [prompts_record, *rollouts, *rewards, trained.record]
    result = checkpoint(
        CheckpointRequest(
            scope=scope,
            kind="train",
            plan=plan_ref,
            records=[record_ref(scope, record, store=session.store) for record in records],
            cursor=plan.cursor,
            previous=plan.previous,
            metrics=step_metrics(rollouts, rewards, trained.record, laps.seconds),
        ),
        session.stages.checkpoint,
    )
    laps.end("checkpoint")
    move_head(session, result)
    session.reports.step(result.commit, flow_run_id=flow_run.get_id())


def load_ahead(session: Session, policy: PolicyRef | None, plan: Plan) -> None:
    """Lets the rollout engine load and prove the next policy while this step is committed.

    Nothing is sampled from it: the next rollout names a committed policy, and loads another one
    if this candidate was not what got committed. So an error here is left to that rollout.
    """
    assert policy is not None, "a train record names its policy"
    request = LoadRequest(
        policy=policy, config=RolloutConfig.model_validate(plan.configs["rollout"])
    )

    def load() -> None:
        try:
            session.stages.rollout.run(request, LoadResult)
        except (Transient, Permanent) as error:
            log.warning("Loading policy %d ahead failed: %s", policy.version, error)

    threading.Thread(target=load, name="load-ahead", daemon=True).start()


def plan_step(session: Session, scope: StepScope) -> tuple[Plan, ObjectRef]:
    """Returns the plan of a step: the stored one, else a new one, put and adopted."""
    found = current_plan(session.store, scope.run, scope.step)
    if found is not None:
        return found
    previous, digest = session.last_commit, session.last_digest
    config = session.config
    drawn = prompts(
        PromptsRequest(
            scope=scope,
            seed=config.seed,
            inputs=session.run.prompts,
            cursor=previous.cursor,
            num_groups=config.prompts.groups_per_step,
        ),
        session.stages.prompts,
    )
    plan = Plan(
        run=scope.run,
        step=scope.step,
        kind="train",
        previous=digest,
        prompts=record_ref(scope, drawn.record, store=session.store),
        shards=_shards(session, previous),
        cursor=drawn.cursor,
        configs=stage_configs(config),
    )
    return adopt_plan(session.store, plan)


def _shards(session: Session, previous: StepCommit) -> list[ShardPlan]:
    config = session.config
    groups, size = config.prompts.groups_per_step, config.rollout.groups_per_shard
    sampling = SamplingPolicy(
        group_size=config.rollout.group_size,
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
        stop_token_ids=session.run.stop_token_ids,
    )
    seed = derived_seed(config.seed, "rollout", previous.cursor.drawn)
    return [
        ShardPlan(
            index=index,
            start=start,
            stop=min(start + size, groups),
            sampling=sampling,
            policy_version=previous.policy_version,
            policy_digest=previous.policy_digest,
            seed=seed,
        )
        for index, start in enumerate(range(0, groups, size))
    ]


def derived_seed(seed: int, *purpose: str | int) -> int:
    """Returns a 48-bit seed for one purpose, so that group seeds have room to be spaced."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _sample_and_grade(
    session: Session, scope: StepScope, plan: Plan, prompts_record: StageRecord, laps: Laps
) -> tuple[list[StageRecord], list[StageRecord]]:
    """Samples every shard and grades each as soon as it lands; both in shard order."""
    shard_prompts = prompts_record.outputs["prompts"]
    total = len(plan.shards)
    session.watcher.stage(scope.step, "rollout")
    sampling: dict[PrefectFuture[RolloutResult], int] = {
        rollout.with_options(task_run_name=f"rollout {shard.index + 1}/{total}").submit(
            _rollout_request(session, scope, plan, shard, shard_prompts), session.stages.rollout
        ): shard.index
        for shard in plan.shards
    }
    rollouts: dict[int, StageRecord] = {}
    grading: dict[int, PrefectFuture[RewardResult]] = {}
    for future in as_completed(list(sampling)):
        index = sampling[future]
        rollouts[index] = future.result().record
        request = _reward_request(session, scope, plan, index, rollouts[index], shard_prompts)
        grading[index] = reward.with_options(task_run_name=f"reward {index + 1}/{total}").submit(
            request, session.stages.reward
        )
    laps.end("rollout")
    session.watcher.stage(scope.step, "reward")
    rewards = [grading[index].result().record for index in range(total)]
    laps.end("reward")
    return [rollouts[index] for index in range(total)], rewards


def _rollout_request(
    session: Session, scope: StepScope, plan: Plan, shard: ShardPlan, shard_prompts: ObjectRef
) -> RolloutRequest:
    return RolloutRequest(
        scope=scope,
        shard=shard.index,
        prompts=shard_prompts,
        start=shard.start,
        stop=shard.stop,
        sampling=shard.sampling,
        seed=shard.seed,
        policy=session.last_commit.policy,
        model=session.run.model,
        config=RolloutConfig.model_validate(plan.configs["rollout"]),
    )


def _reward_request(
    session: Session,
    scope: StepScope,
    plan: Plan,
    index: int,
    sampled: StageRecord,
    shard_prompts: ObjectRef,
) -> RewardRequest:
    return RewardRequest(
        scope=scope,
        shard=index,
        samples=sampled.outputs["samples"],
        prompts=shard_prompts,
        model=session.run.model,
        config=RewardConfig.model_validate(plan.configs["reward"]),
    )


def _train_request(
    session: Session,
    scope: StepScope,
    plan: Plan,
    prompts_record: StageRecord,
    rollouts: Sequence[StageRecord],
    rewards: Sequence[StageRecord],
) -> TrainRequest:
    config = TrainConfig.model_validate(plan.configs["train"])
    return TrainRequest(
        scope=scope,
        samples=[record.outputs["samples"] for record in rollouts],
        rewards=[record.outputs["rewards"] for record in rewards],
        prompts=prompts_record.outputs["prompts"],
        policy=session.last_commit.policy,
        state_id=session.last_commit.state_id,
        temperature=plan.shards[0].sampling.temperature,
        update_index=_update_index(session),
        model=session.run.model,
        config=config,
        snapshot_due=scope.step % config.snapshot_every == 0,
    )


def _update_index(session: Session) -> int:
    """Returns the optimizer updates made before the open step; genesis makes none."""
    commit = session.last_commit
    while commit.kind == "skipped":
        commit, _ = read_commit(session.store, commit.run, commit.step - 1)
    ref = next(ref for ref in commit.records if ref.stage == "train")
    request = read_record(session.store, ref).request
    if request["kind"] == "genesis":
        return 0
    config = TrainConfig.model_validate(request["config"])
    return request["update_index"] + optimizer_updates(config)


def move_head(session: Session, result: CheckpointResult) -> None:
    """Takes the commit that stands as the run's newest."""
    commit = result.commit
    session.head = (commit, result.digest)
    if not result.ours:
        session.watcher.say(
            f"step {commit.step} was committed by attempt {commit.attempt[:8]}; adopted it"
        )
    log.info(
        "committed run=%s step=%d attempt=%s policy_version=%d policy=%s",
        commit.run,
        commit.step,
        commit.attempt[:8],
        commit.policy_version,
        commit.policy_digest[:12],
    )
