"""Held-out accuracy of a committed policy version, as one flow run; nothing is trained."""

from prefect import flow
from prefect.runtime import flow_run

from flows.config import EvalSuite
from flows.eval_records import eval_record
from flows.planning import derived_seed
from flows.session import Session, session_of
from storage.layout import EvalScope
from storage.ledger import put_eval, record_ref
from storage.records import EvalRecord, PolicyRef, SamplingPolicy, StageRecord
from tasks.prompts.stage import held_out_rows
from tasks.reward.contract import RewardRequest
from tasks.reward.task import reward
from tasks.rollout.contract import RolloutRequest
from tasks.rollout.task import rollout


@flow(name="evaluate", flow_run_name="evaluate version {version}", persist_result=False)
def evaluate(run: str, version: int) -> None:
    """Samples and grades the held-out prompts with the run's newest policy, suite by suite.

    Each suite's EvalRecord is put once; a second call finds the stage records and does no work.

    Raises:
        ValueError: `version` is not the newest committed policy; only that one is loaded.
    """
    session = session_of(run)
    policy = session.last_commit.policy
    if policy.version != version:
        raise ValueError(
            f"Version {version} of {run} was asked for, but the newest committed one is "
            f"{policy.version}. Evaluate the newest, or export the other and evaluate the export."
        )
    for name, suite in session.config.evaluate.suites.items():
        session.watcher.begin(f"evaluating version {version}: {name}")
        record = _evaluate_suite(session, name, suite, policy)
        session.watcher.evaluated(record)
        session.reports.evaluated(record, flow_run_id=flow_run.get_id())


def _evaluate_suite(session: Session, name: str, suite: EvalSuite, policy: PolicyRef) -> EvalRecord:
    scope = EvalScope(run=session.run.run, version=policy.version, suite=name)
    rollouts: list[StageRecord] = []
    rewards: list[StageRecord] = []
    for request in _shard_requests(session, scope, suite, policy):
        sampled = rollout(request, session.stages.rollout).record
        rollouts.append(sampled)
        graded = reward(_reward_request(session, request, sampled), session.stages.reward)
        rewards.append(graded.record)
    record = eval_record(
        session.store,
        scope,
        policy_digest=policy.digest,
        records=[
            (record_ref(scope, found, store=session.store), found)
            for found in [*rollouts, *rewards]
        ],
        accuracy_part=session.config.reward.accuracy_part.stored_name,
    )
    return put_eval(session.store, record)


def _shard_requests(
    session: Session, scope: EvalScope, suite: EvalSuite, policy: PolicyRef
) -> list[RolloutRequest]:
    config, held_out = session.config.rollout, session.run.prompts.held_out
    rows = len(held_out_rows(session.run.prompts, limit=suite.max_prompts))
    size = max(config.groups_per_shard * config.group_size // suite.completions, 1)
    sampling = SamplingPolicy(
        group_size=suite.completions,
        temperature=suite.temperature,
        top_p=suite.top_p,
        top_k=suite.top_k,
        max_tokens=suite.max_tokens or config.max_tokens,
        stop_token_ids=session.run.stop_token_ids,
    )
    return [
        RolloutRequest(
            scope=scope,
            shard=index,
            prompts=held_out,
            start=start,
            stop=min(start + size, rows),
            sampling=sampling,
            seed=derived_seed(session.config.seed, "evaluate", scope.suite),
            policy=policy,
            model=session.run.model,
            config=config,
        )
        for index, start in enumerate(range(0, rows, size))
    ]


def _reward_request(
    session: Session, request: RolloutRequest, sampled: StageRecord
) -> RewardRequest:
    return RewardRequest(
        scope=request.scope,
        shard=request.shard,
        samples=sampled.outputs["samples"],
        prompts=request.prompts,
        model=session.run.model,
        config=session.config.reward,
    )
