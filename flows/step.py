"""One RL step as one flow run: plan, rollout, reward, train, checkpoint."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefect import flow
from prefect.context import TagsContext
from prefect.futures import PrefectFuture, as_completed
from prefect.runtime import flow_run

from flows.metrics import step_metrics
from flows.planning import plan_step
from flows.session import Session, session_of
from storage.environment import changes
from storage.layout import StepScope
from storage.ledger import read_record, record_ref
from storage.records import (
    Metrics,
    ObjectRef,
    Plan,
    PolicyRef,
    RecordRef,
    ShardPlan,
    StageRecord,
)
from tasks.checkpoint.contract import CheckpointRequest, CheckpointResult
from tasks.checkpoint.task import checkpoint
from tasks.errors import Permanent, Transient
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
from tasks.train.history import updates_so_far
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
    # Prefect asks its server about limits for each task run that has tags; these say nothing that
    # the step's do not.
    with TagsContext(current_tags=set()):
        _make(session_of(run), StepScope(run=run, step=step))


def _make(session: Session, scope: StepScope) -> None:
    step, laps = scope.step, Laps()
    session.watcher.stage(step, "plan")
    plan, plan_ref = plan_step(session, scope)
    assert plan.prompts is not None, "only genesis has no prompts"
    prompts_record = read_record(session.store, plan.prompts)
    laps.end("plan")
    if plan.kind == "skipped":
        _commit(session, scope, plan, plan_ref, [plan.prompts, *session.stop_snapshot], {})
        return
    rollouts, rewards = _sample_and_grade(session, scope, plan, prompts_record, laps)
    session.watcher.stage(step, "train")
    request = _train_request(session, scope, plan, prompts_record, rollouts, rewards)
    trained = train(request, session.stages.train)
    laps.end("train")
    load_ahead(session, trained.record.policy, plan)
    session.watcher.stage(step, "checkpoint")
    records = [prompts_record, *rollouts, *rewards, trained.record]
    refs = [record_ref(scope, record, store=session.store) for record in records]
    metrics = step_metrics(rollouts, rewards, trained.record, laps.seconds)
    session.unsaved.trained(trained.record, seconds=laps.seconds["train_s"])
    _say_environment(session, trained.record)
    _say_rebased(session, trained.record)
    _commit(session, scope, plan, plan_ref, [*refs, *session.stop_snapshot], metrics)


def _commit(
    session: Session,
    scope: StepScope,
    plan: Plan,
    plan_ref: ObjectRef,
    records: list[RecordRef],
    metrics: Metrics,
) -> None:
    result = checkpoint(
        CheckpointRequest(
            scope=scope,
            kind=plan.kind,
            plan=plan_ref,
            records=records,
            cursor=plan.cursor,
            previous=plan.previous,
            metrics=metrics,
        ),
        session.stages.checkpoint,
    )
    move_head(session, result)
    session.reports.step(result.commit, digest=result.digest, flow_run_id=flow_run.get_id())


def _say_environment(session: Session, record: StageRecord) -> None:
    before, session.environment = session.environment, record.environment
    differences = changes(before, record.environment) if before else []
    if differences:
        session.watcher.say(
            f"another environment trains since step {session.last_commit.step}, and its records "
            f"say so: {'; '.join(differences)}"
        )


def _say_rebased(session: Session, record: StageRecord) -> None:
    rebased = record.rebased
    if rebased is not None:
        session.watcher.say(
            f"rebased: replaying steps {rebased.steps} gave other bits here; {rebased.num_elements}"
            f" weights took their published value (at most {rebased.max_abs_diff:.2g}, on average "
            f"{rebased.share:.2%} of what a step changes). The commit records it."
        )


def load_ahead(session: Session, policy: PolicyRef | None, plan: Plan) -> None:
    """Lets the rollout engine load and prove the next policy while this step is committed.

    Nothing is sampled from it: the next rollout names a committed policy, and loads another one
    if this candidate was not what got committed. So an error here is left to that rollout.
    """
    assert policy is not None, "a train record names its policy"
    if not session.stages.rollout.warm:
        return
    request = LoadRequest(
        policy=policy, config=RolloutConfig.model_validate(plan.configs["rollout"])
    )

    def load() -> None:
        try:
            session.stages.rollout.run(request, LoadResult)
        except (Transient, Permanent) as error:
            log.warning("Loading policy %d ahead failed: %s", policy.version, error)

    threading.Thread(target=load, name="load-ahead", daemon=True).start()


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
        redo=plan.redo,
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
        redo=plan.redo,
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
        update_index=updates_so_far(session.store, session.last_commit),
        model=session.run.model,
        config=config,
        # A trainer that ends with its stage leaves nothing but what it stored.
        snapshot_due=session.unsaved.due(config) or not session.stages.train.warm,
        rebase=session.rebase,
        redo=plan.redo,
    )


def move_head(session: Session, result: CheckpointResult) -> None:
    """Takes the commit that stands as the run's newest."""
    commit = result.commit
    session.head = (commit, result.digest)
    session.stop_snapshot = []
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
