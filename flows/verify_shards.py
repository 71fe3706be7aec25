"""The facts of one shard, of a step or of an evaluation: what was sampled, and how it is graded."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from flows.limits import reward_here
from flows.overrides import overridden_reward
from rewards.contract import HOW_IT_IS_ASKED
from storage.audit_findings import Tally
from storage.experience import read_shard
from storage.layout import EvalScope, StepScope
from storage.object_store import ObjectStore
from storage.objects import read_object
from storage.records import ObjectRef, PolicyRef, RunRecord, StageRecord, canonical_json
from storage.schemas import REWARDS
from tasks.reward.audit import OtherReward, audit_rewards, needs_trust, regrade, say_regraded
from tasks.reward.contract import RewardConfig, RewardRequest
from tasks.reward.grading import Grading
from tasks.rollout.audit import audit_samples
from tasks.rollout.contract import RolloutRequest, requested_config
from tasks.workspace import Workspace

NOT_CHECKED = "steps not checked"
"""What a step counts as that this version of the code cannot read."""

MALFORMED = (KeyError, TypeError, OverflowError)
"""What a request raises that no stage of ours was ever asked."""

MAX_GRADERS = 4
"""Ways to grade that are kept warm at once: a run changes its reward rarely."""

MAX_EXAMPLES = 5
"""Samples of one shard that a report names one by one."""


@dataclass(frozen=True)
class RewardDifferences:
    """One shard whose samples are graded otherwise today."""

    step: int
    shard: str
    num_samples: int
    num_differing: int
    examples: list[OtherReward]


@dataclass
class Facts:
    """What came out over all steps that were looked at.

    `chain_is_broken` excuses what cannot be read: the chain says where and why.
    """

    chain_is_broken: bool = False
    tally: Tally = field(default_factory=Tally)
    steps: list[int] = field(default_factory=list[int])
    differences: list[RewardDifferences] = field(default_factory=list[RewardDifferences])
    left_out: list[str] = field(default_factory=list[str])
    unchecked: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Graders:
    """What grades again, one per way to grade, warm until the audit ends."""

    workspace: Workspace
    stack: ExitStack
    trust: bool = False
    """Whether to grade also by code and services that the run's config names."""
    overrides: Sequence[str] = ()
    """`reward.key=value`: how the auditor would have graded instead."""
    opened: dict[bytes, Grading] = field(default_factory=dict[bytes, Grading])

    def grading(self, config: RewardConfig) -> Grading:
        """Returns what grades as `config` says, started if it is the first to ask."""
        key = canonical_json(config.model_dump(mode="json"))
        if key not in self.opened:
            if len(self.opened) == MAX_GRADERS:
                self.opened.pop(next(iter(self.opened))).close()
            made = Grading(reward_here(config), workspace=self.workspace)
            self.opened[key] = self.stack.enter_context(made)
        return self.opened[key]


@contextmanager
def open_graders(
    workspace: Workspace, *, trust: bool, overrides: Sequence[str] = ()
) -> Iterator[Graders]:
    """Yields graders; their processes end with the block."""
    with ExitStack() as stack:
        yield Graders(workspace, stack, trust, overrides)


@dataclass(frozen=True)
class Shard:
    """One shard of a step or an evaluation: what it was sampled from."""

    scope: StepScope | EvalScope
    run: RunRecord
    prompts: ObjectRef
    policy: PolicyRef
    number: str

    def rollout_request(self, record: StageRecord) -> RolloutRequest:
        """Returns the request that a rollout record answers."""
        body = record.request
        start, stop = body["rows"]
        return RolloutRequest(
            scope=self.scope,
            shard=int(self.number),
            prompts=self.prompts,
            start=start,
            stop=stop,
            sampling=body["sampling"],
            seed=body["seed"],
            policy=self.policy,
            model=self.run.model,
            config=requested_config(body),
            redo=body.get("redo", 0),
        )

    def reward_request(self, record: StageRecord, samples: ObjectRef) -> RewardRequest:
        """Returns the request that a reward record answers.

        What it says beside what rewards depend on, like how many processes grade, is not obeyed.
        """
        config = RewardConfig.model_validate(record.request["config"])
        return RewardRequest(
            scope=self.scope,
            shard=int(self.number),
            samples=samples,
            prompts=self.prompts,
            model=self.run.model,
            config=RewardConfig.model_validate(config.request_fields()),
            redo=record.request.get("redo", 0),
        )


def audit_shard(
    store: ObjectStore,
    shard: Shard,
    records: dict[str, StageRecord],
    graders: Graders,
    facts: Facts,
    tally: Tally,
) -> None:
    """Adds to `tally` and `facts` in what a shard is not what it was asked for, or graded as.

    Args:
        store: holds the shard.
        shard: which one, and what it was sampled from.
        records: of its step or evaluation, by stage.
        graders: grade again.
        facts: takes what is graded otherwise, and what was left out.
        tally: is told.

    Raises:
        NotFound, Corrupt: something is gone, or is not what its reference names.
        Permanent: samples and prompts do not belong together.
        KeyError: a stage or a field of its request is missing.
        ValueError: this version of the code has no such config.
    """
    sampled, graded = records[f"rollout-{shard.number}"], records[f"reward-{shard.number}"]
    request = shard.rollout_request(sampled)
    vocabulary = _vocabulary(store, shard.run)
    samples = audit_samples(store, request, sampled, vocabulary=vocabulary, tally=tally)
    rewards = graded.outputs["rewards"]
    ids: list[str] = samples.column("sample_id").to_pylist()
    stored = read_shard(store, rewards, schema=REWARDS)
    audit_rewards(stored, ids, key=rewards.key, tally=tally)
    asked = shard.reward_request(graded, sampled.outputs["samples"])
    if graders.overrides:
        config = overridden_reward(asked.config, graders.overrides)
        asked = asked.model_copy(update={"config": config})
    number = shard.scope.step if isinstance(shard.scope, StepScope) else shard.scope.version
    danger = None if graders.trust else needs_trust(asked.config)
    if danger is not None:
        facts.left_out.append(
            f"step {number}: rewards of shard {shard.number}: {danger}; --trust does it"
        )
        tally.counts["rewards left out"] += stored.num_rows
        return
    if graders.trust:
        config = asked_as_then(asked.config, shard.run)
        asked = asked.model_copy(update={"config": config})
    engine = graders.grading(asked.config)
    found = regrade(
        asked,
        graded,
        store,
        engine,
        cache=graders.workspace.cache,
        as_recorded=not graders.overrides,
    )
    if graders.overrides:
        found.others = [other for other in found.others if other.is_other_verdict]
        tally.counts["rewards graded another way"] += found.num_samples - len(found.left_out)
    else:
        say_regraded(found, rewards, tally=tally)
    facts.left_out += [f"step {number}: {line}" for line in found.left_out]
    if found.others:
        facts.differences.append(
            RewardDifferences(
                step=number,
                shard=rewards.key,
                num_samples=found.num_samples,
                num_differing=len(found.others),
                examples=found.others if graders.overrides else found.others[:MAX_EXAMPLES],
            )
        )


def asked_as_then(config: RewardConfig, run: RunRecord) -> RewardConfig:
    """Returns the config with what requests leave out of how services are asked: the token."""
    parts: list[dict[str, Any]] = run.config["reward"]["parts"]
    manners = {
        (part["kind"], part.get("name")): {
            name: value for name, value in part["options"].items() if name in HOW_IT_IS_ASKED
        }
        for part in parts
    }
    completed = [
        part.model_copy(update={"options": manners.get((part.kind, part.name), {}) | part.options})
        for part in config.parts
    ]
    return config.model_copy(update={"parts": completed})


def _vocabulary(store: ObjectStore, run: RunRecord) -> int | None:
    """Returns how many token ids the model knows, as its config says, wherever it says it."""
    ref = run.model.files.get("config.json")
    if ref is None:
        return None
    config = json.loads(read_object(store, ref))
    found = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(found) if found else None
