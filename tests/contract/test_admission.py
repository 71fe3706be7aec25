"""A service does only what the store bears out: every other request is refused by name."""

import uuid
from typing import Any

import pytest

import tasks.reward.stage as reward_stage
import tasks.rollout.stage as rollout_stage
import tasks.train.stage as train_stage
from storage.layout import EvalScope, StepScope
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig
from tasks.errors import Permanent
from tasks.reward.contract import RewardConfig, RewardPart, RewardRequest
from tasks.rollout.contract import LoadRequest, ReplayRequest, RolloutConfig, RolloutRequest
from tasks.train.contract import GenesisRequest, SnapshotRequest, TrainConfig, TrainRequest
from tests.contract.complete_run import SAMPLING, open_step, write_run

ROLLOUT = RolloutConfig(max_tokens=5, max_model_len=64)
TRAIN = TrainConfig(learning_rate=0.1)
REWARD = RewardConfig(parts=[RewardPart(kind="exact", accuracy=True)])
CONFIGS = {
    "rollout": ROLLOUT.model_dump(mode="json"),
    "train": TRAIN.model_dump(mode="json"),
    "reward": REWARD.model_dump(mode="json"),
    "seed": 7,
}


class Open:
    """A run with genesis, and step 1 planned, sampled and graded; and what would be asked."""

    def __init__(self) -> None:
        uri = f"memory://{uuid.uuid4().hex}"
        self.store: ObjectStore = open_store(StoreConfig(uri=uri), writing=True)
        self.head = write_run(self.store, 0)
        _, self.prompts, samples, rewards = open_step(self.store, self.head, configs=CONFIGS)
        scope, run, commit = StepScope(run="made", step=1), self.head.run, self.head.commit
        self.rollout = RolloutRequest(
            scope=scope,
            shard=1,
            prompts=self.prompts,
            start=2,
            stop=4,
            sampling=SAMPLING,
            seed=11,
            policy=commit.policy,
            model=run.model,
            config=ROLLOUT,
        )
        self.train = TrainRequest(
            scope=scope,
            samples=samples,
            rewards=rewards,
            prompts=self.prompts,
            policy=commit.policy,
            state_id=commit.state_id,
            temperature=1.0,
            update_index=0,
            model=run.model,
            config=TRAIN,
            snapshot_due=False,
        )
        self.reward = RewardRequest(
            scope=scope,
            shard=1,
            samples=samples[1],
            prompts=self.prompts,
            model=run.model,
            config=REWARD,
        )


@pytest.fixture
def opened() -> Open:
    return Open()


def changed(request: Any, **fields: Any) -> Any:
    return request.model_copy(update=fields)


def test_what_the_plan_asks_for_is_admitted(opened: Open):
    rollout_stage.admit(opened.rollout, opened.store, run="made")
    train_stage.admit(opened.train, opened.store, run="made")
    reward_stage.admit(opened.reward, opened.store, run="made")


def test_another_run_is_refused_by_name(opened: Open):
    for stage, request in (
        (rollout_stage, opened.rollout),
        (train_stage, opened.train),
        (reward_stage, opened.reward),
    ):
        with pytest.raises(Permanent, match=r"serves run 'other', and the request is of run 'mad"):
            stage.admit(request, opened.store, run="other")


def test_an_unknown_run_is_refused(opened: Open):
    scope = StepScope(run="nobody", step=1)
    with pytest.raises(Permanent, match="There is no run 'nobody'"):
        rollout_stage.admit(changed(opened.rollout, scope=scope), opened.store, run="nobody")


def test_a_step_that_is_committed_or_not_planned_is_refused(opened: Open):
    again = changed(opened.rollout, scope=StepScope(run="made", step=0))
    with pytest.raises(Permanent, match=r"Step 0 of run 'made' is committed.*repetition"):
        rollout_stage.admit(again, opened.store, run="made")
    early = changed(opened.rollout, scope=StepScope(run="made", step=2))
    with pytest.raises(Permanent, match="Step 2 of run 'made' has no plan"):
        rollout_stage.admit(early, opened.store, run="made")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("start", 1, "rows"),
        ("seed", 12, "seed"),
        ("redo", 1, "redo"),
        ("config", ROLLOUT.model_copy(update={"max_num_seqs": 3}), "config"),
        ("sampling", SAMPLING.model_copy(update={"group_size": 99}), "sampling"),
        ("shard", 5, "no shard 5"),
    ],
)
def test_a_shard_that_the_plan_does_not_have_is_refused(
    opened: Open, field: str, value: Any, named: str
):
    with pytest.raises(Permanent, match=named):
        rollout_stage.admit(changed(opened.rollout, **{field: value}), opened.store, run="made")


def test_a_policy_that_is_not_the_committed_one_is_refused(opened: Open):
    policy = opened.head.commit.policy.model_copy(update={"digest": "f" * 64})
    for stage, request in ((rollout_stage, opened.rollout), (train_stage, opened.train)):
        with pytest.raises(Permanent, match="policy is not what commit 0 says"):
            stage.admit(changed(request, policy=policy), opened.store, run="made")
    with pytest.raises(Permanent, match="named by no record"):
        rollout_stage.admit(LoadRequest(policy=policy, config=ROLLOUT), opened.store, run="made")
    known = LoadRequest(policy=opened.head.commit.policy, config=ROLLOUT)
    rollout_stage.admit(known, opened.store, run="made")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("state_id", "f" * 64, "state"),
        ("update_index", 3, "update index"),
        ("temperature", 0.5, "temperature"),
        ("config", TrainConfig(learning_rate=0.2), "config"),
    ],
)
def test_an_update_that_does_not_follow_is_refused(
    opened: Open, field: str, value: Any, named: str
):
    with pytest.raises(Permanent, match=named):
        train_stage.admit(changed(opened.train, **{field: value}), opened.store, run="made")


def test_experience_that_nobody_recorded_is_refused(opened: Open):
    made_up = opened.train.samples[0].model_copy(update={"sha256": "f" * 64})
    request = changed(opened.train, samples=[made_up, opened.train.samples[1]])
    with pytest.raises(Permanent, match="No rollout-0000 record"):
        train_stage.admit(request, opened.store, run="made")
    few = changed(opened.train, samples=opened.train.samples[:1])
    with pytest.raises(Permanent, match="number of shards"):
        train_stage.admit(few, opened.store, run="made")
    graded = changed(opened.reward, samples=made_up)
    with pytest.raises(Permanent, match="No rollout-0001 record"):
        reward_stage.admit(graded, opened.store, run="made")


def test_a_base_model_of_other_weights_is_refused(opened: Open):
    request = GenesisRequest(
        scope=StepScope(run="made", step=0),
        model=opened.head.run.model,
        weights=opened.head.run.weights,
        model_dir="/nowhere",
        seed=7,
        config=TRAIN,
    )
    with pytest.raises(Permanent, match="Step 0 of run 'made' is committed"):
        train_stage.admit(request, opened.store, run="made")


def test_a_snapshot_is_stored_of_the_committed_state_alone(opened: Open):
    scope, state = StepScope(run="made", step=0), opened.head.commit.state_id
    request = SnapshotRequest(scope=scope, state_id=state, ranks=1, zero_stage=2)
    train_stage.admit(request, opened.store, run="made")
    with pytest.raises(Permanent, match="state is not what commit 0 says"):
        train_stage.admit(changed(request, state_id="f" * 64), opened.store, run="made")


def test_an_evaluation_takes_held_out_prompts_and_a_committed_policy(opened: Open):
    scope = EvalScope(run="made", version=0, suite="held_out")
    held_out = opened.head.run.prompts.held_out
    request = changed(opened.rollout, scope=scope, prompts=held_out)
    rollout_stage.admit(request, opened.store, run="made")
    with pytest.raises(Permanent, match=r"prompts is not what run\.json says"):
        rollout_stage.admit(changed(request, prompts=opened.prompts), opened.store, run="made")
    later = changed(request, scope=EvalScope(run="made", version=4, suite="held_out"))
    with pytest.raises(Permanent, match="policy is not what commit 4 says"):
        rollout_stage.admit(later, opened.store, run="made")


def test_nothing_is_replayed_by_a_service(opened: Open):
    head = opened.head.commit
    request = ReplayRequest(
        scope=StepScope(run="made", step=0),
        record=head.records[0],
        prompts=opened.prompts,
        policy=head.policy,
        model=opened.head.run.model,
    )
    with pytest.raises(Permanent, match="rollbook verify"):
        rollout_stage.admit(request, opened.store, run="made")
