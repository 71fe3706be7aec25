"""Committed train stages run again from stored experience, compared, and rebased where allowed.

DESIGN.md section 5. Nothing here writes to the store.
"""

import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from storage import environment
from storage.errors import NotFound
from storage.ledger import read_record
from storage.object_store import ObjectStore
from storage.objects import file_sha256, offer_file
from storage.policies import open_policy, policy_digest
from storage.records import ObjectRef, PolicyRef, Rebase, StageRecord, StepCommit
from storage.safetensors_files import tensor_files
from tasks.errors import Permanent
from tasks.train.algorithms.contract import Verdicts
from tasks.train.contract import Deviation, TrainConfig, TrainEngine
from tasks.train.experience import Experience, judge, make_updates, read_experience
from tasks.workspace import Workspace

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "deepspeed", "transformers", "safetensors", "numpy", "pyarrow", "pydantic")
"""What decides the bits of an update."""


@dataclass(frozen=True)
class Committed:
    """A committed train stage."""

    commit: StepCommit
    record: StageRecord

    @property
    def step(self) -> int:
        """The step that it belongs to."""
        return self.commit.step

    @property
    def state_id(self) -> str:
        """The digest of its record, which names the state that it ends in."""
        return self.commit.state_id

    @property
    def policy(self) -> PolicyRef:
        """What it published."""
        assert self.record.policy is not None, "a train record names its policy"
        return self.record.policy


@dataclass(frozen=True)
class Retrained:
    """What a replayed train stage was made of, and what the learner said of it."""

    experience: Experience
    judged: Verdicts
    learner_logprobs: dict[str, list[float]]
    updated: bool
    """Whether there was anything to learn; else the step publishes the policy before it."""


def retrain(store: ObjectStore, engine: TrainEngine, committed: Committed) -> Retrained:
    """Makes the update of a committed step again; the engine must hold the state before it.

    Raises:
        Corrupt: a record or shard is not what its reference names.
    """
    request = committed.record.request
    config = TrainConfig.model_validate(request["config"])
    engine.configure(config)
    samples, rewards = _shards(store, committed.commit)
    experience = read_experience(store, samples=samples, rewards=rewards)
    judged = judge(experience, config)
    updates = make_updates(
        experience, judged.verdicts, config=config, update_index=request["update_index"]
    )
    if not updates:
        return Retrained(experience, judged, {}, updated=False)
    told = engine.update(updates, temperature=request["temperature"])
    return Retrained(experience, judged, told.learner_logprobs, updated=True)


def _shards(store: ObjectStore, commit: StepCommit) -> tuple[list[ObjectRef], list[ObjectRef]]:
    refs = {ref.stage: ref for ref in commit.records}
    numbers = [stage.removeprefix("rollout-") for stage in refs if stage.startswith("rollout-")]
    numbers.sort(key=int)
    samples = [read_record(store, refs[f"rollout-{n}"]).outputs["samples"] for n in numbers]
    rewards = [read_record(store, refs[f"reward-{n}"]).outputs["rewards"] for n in numbers]
    return samples, rewards


def published_digest(
    engine: TrainEngine,
    committed: Committed,
    retrained: Retrained | None,
    *,
    workspace: Workspace,
) -> str:
    """Returns the digest of the policy that the step would publish now.

    `retrained` is None for genesis, which always publishes.
    If it is the recorded one its files go into the cache: whoever needs the policy on this host
    has it, also where retention gave it up. A step without an update writes none, whatever
    precision its config names.
    """
    if retrained is not None and not retrained.updated:
        return committed.record.request["policy"]
    config = TrainConfig.model_validate(committed.record.request["config"])
    directory = workspace.scratch / "replayed-policy"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    engine.save_policy(directory, max_file_bytes=config.policy_file_bytes)
    digest = policy_digest(directory)
    if digest == committed.policy.digest:
        for path in tensor_files(directory):
            offer_file(workspace.cache, path, file_sha256(path))
    shutil.rmtree(directory)
    return digest


def described(engine: TrainEngine) -> dict[str, str]:
    """Returns the environment that a train record of this engine would name."""
    return environment.describe(PACKAGES) | engine.environment()


@dataclass
class Settlement:
    """The replay of several steps: where it began, and what had to be rebased so far."""

    store: ObjectStore
    engine: TrainEngine
    workspace: Workspace
    rebase: bool
    tolerance: float
    base: Committed
    """The last step whose published weights the masters agreed with."""
    passed: list[Committed] = field(default_factory=list)
    """Steps since `base`, oldest first."""
    rebased: list[tuple[Committed, Deviation]] = field(default_factory=list)

    def rebase_record(self) -> Rebase | None:
        """Returns what the next train record says of it; None if every bit was right."""
        if not self.rebased:
            return None
        deviations = [deviation for _, deviation in self.rebased]
        return Rebase(
            steps=[committed.step for committed, _ in self.rebased],
            num_elements=sum(deviation.num_elements for deviation in deviations),
            max_abs_diff=max(deviation.max_abs_diff for deviation in deviations),
            share=max(deviation.share for deviation in deviations),
            was=self.rebased[-1][0].record.environment_digest,
            now=environment.digest(described(self.engine)),
        )


def settle(
    settlement: Settlement, committed: Committed, retrained: Retrained, *, last: bool
) -> None:
    """Compares what a replayed step gave with its commit; rebases the masters if that is allowed.

    Rebased means: masters whose cast differs from the published tensor take its value, moments
    stay. Allowed under another environment if asked for, and without asking where the platform
    promises no bits (not a CPU); never beyond `train.rebase_tolerance`. A step whose policy files
    retention gave up is passed over, and the next one settles for it.

    Args:
        settlement: the replay so far.
        committed: the step that was just retrained.
        retrained: what that made.
        last: whether the state is wanted after this step, so that it must be settled.

    Raises:
        Permanent: other bits where they may not differ, or too far away.
    """
    engine, record = settlement.engine, committed.record
    policy = published_digest(engine, committed, retrained, workspace=settlement.workspace)
    state = engine.state_digest() if record.state_digest else None
    if (policy, state) == (committed.policy.digest, record.state_digest):
        settlement.base, settlement.passed = committed, []
        return
    settlement.passed.append(committed)
    _check_allowed(settlement, committed, policy=policy, state=state)
    published, before = _directories(settlement, committed)
    if published is None or before is None:
        _check_not_last(committed, last=last)
        return
    deviation = engine.compare(published, before)
    _check_tolerance(committed, deviation, settlement.tolerance)
    engine.take(published)
    logger.warning("rebased step %d: %s", committed.step, deviation)
    settlement.rebased.append((committed, deviation))
    settlement.base, settlement.passed = committed, []


def _check_allowed(
    settlement: Settlement, committed: Committed, *, policy: str, state: str | None
) -> None:
    record = committed.record
    changes = environment.changes(record.environment, described(settlement.engine))
    what = (
        f"Replaying the train stage of step {committed.step} of run {committed.commit.run} gave "
        f"policy {policy} and state {state}. Expected policy {committed.policy.digest} and state "
        f"{record.state_digest}, which the commit names"
    )
    if not promises_bits(settlement.engine):
        return
    if not changes:
        raise Permanent(
            f"{what}, under the same environment. The stored experience, or this machine, is not "
            "what it was: run `rollbook verify` on the run, and compare with a copy of the store."
        )
    if not settlement.rebase:
        raise Permanent(
            f"{what}. The environment is another one ({'; '.join(changes)}), so bits may differ: "
            "go back to the recorded one, or accept the difference within train.rebase_tolerance "
            f"with `rollbook resume {committed.commit.run} --rebase`, which the next commit records"
        )


def promises_bits(engine: TrainEngine) -> bool:
    """Tells whether equal requests give equal bits on the engine's device."""
    return engine.environment()["device"] == "cpu"


def _directories(settlement: Settlement, committed: Committed) -> tuple[Path | None, Path | None]:
    """Returns the files of what was published, and of the nearest policy before it."""
    published = open_kept(settlement.store, committed.policy, settlement.workspace)
    earlier = [settlement.base, *settlement.passed[:-1]]
    candidates = (
        open_kept(settlement.store, found.policy, settlement.workspace)
        for found in reversed(earlier)
    )
    return published, next((found for found in candidates if found is not None), None)


def open_kept(store: ObjectStore, policy: PolicyRef, workspace: Workspace) -> Path | None:
    """Returns the files of a policy, or None where retention gave them up."""
    try:
        return open_policy(store, policy, cache=workspace.cache)
    except NotFound:
        return None


def _check_not_last(committed: Committed, *, last: bool) -> None:
    if last:
        raise Permanent(
            f"Step {committed.step} of run {committed.commit.run} cannot be rebased: its policy "
            "files, or all of those before it, are gone. Expected the last policies, which "
            "retention keeps. Restore them from a copy of the store."
        )


def _check_tolerance(committed: Committed, deviation: Deviation, tolerance: float) -> None:
    if deviation.share > tolerance:
        raise Permanent(
            f"Replaying step {committed.step} of run {committed.commit.run} gave weights that "
            f"differ on average by {deviation.share:.1%} of what the step changed them, at most by "
            f"{deviation.max_abs_diff:.3g}. Expected at most {tolerance:.1%} "
            "(train.rebase_tolerance): this is no matter of rounding. Run `rollbook verify`, and "
            "resume in the recorded environment."
        )
