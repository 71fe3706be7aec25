"""A run as a small record: what `rollbook show` prints and `train_run` returns."""

from typing import Literal

from storage.leases import look
from storage.ledger import commits, lineage, read_evals, read_run
from storage.object_store import ObjectStore
from storage.records import EvalRecord, Record, RunRecord, StepCommit
from storage.store_config import StoreConfig


class StepSummary(Record):
    """One committed step; metrics that it does not have are null."""

    step: int
    kind: str
    digest: str
    policy_version: int
    policy_digest: str
    reward_mean: float | None
    accuracy: float | None
    loss: float | None
    grad_norm: float | None
    completion_tokens_mean: float | None
    truncated_share: float | None
    seconds: float | None


class EvalSummary(Record):
    """One evaluation: mean over prompts with its 95% interval."""

    step: int
    suite: str
    accuracy: float | None
    low: float | None
    high: float | None
    num_prompts: int


class RunSummary(Record):
    """A run as of its newest commit. `step` of an evaluation is its policy version.

    A fork's first step is the one that it left its parent at (`parent`, `RUN@STEP`); evaluations
    of its ancestors' policies that it rests on are among its own.
    """

    run: str
    store: str
    endpoint: str | None
    recipe: str
    parent: str | None = None
    head_step: int | None
    head_digest: str | None
    policy_version: int | None
    policy_digest: str | None
    steps: list[StepSummary]
    evals: list[EvalSummary]
    ui_url: str | None = None
    state: Literal["complete", "running", "crashed", "stopped"] = "stopped"
    """Commits decide what is complete, whatever else is said of it later. `crashed`: its controller
    died without letting go of its lease; `resume` goes on, as after `stopped`."""


def summarise(
    store: ObjectStore, run: str, *, store_config: StoreConfig, ui_url: str | None = None
) -> RunSummary:
    """Reads all commits and evaluations of `run`; the chain is checked on the way.

    Waits up to the lease's time (10 s) for a sign of life of a controller on another host.

    Raises:
        NotFound: there is no such run.
        Corrupt: the chain of commits is broken; the message says where.
    """
    record, _ = read_run(store, run)
    chain = list(commits(store, run))
    head, head_digest = chain[-1] if chain else (None, None)
    return RunSummary(
        run=run,
        store=store_config.uri,
        endpoint=store_config.endpoint,
        recipe=str(record.config.get("recipe")),
        parent=f"{record.parent.run}@{record.parent.step}" if record.parent else None,
        head_step=head.step if head else None,
        head_digest=head_digest,
        policy_version=head.policy_version if head else None,
        policy_digest=head.policy_digest if head else None,
        steps=[_step(commit, digest) for commit, digest in chain],
        evals=[_evaluation(found) for found in known_evals(store, run)],
        ui_url=ui_url,
        state=_state(store, record, head),
    )


def known_evals(store: ObjectStore, run: str) -> list[EvalRecord]:
    """Returns the evaluations of every policy that led to a run, by version, its parents' too.

    Not those of a parent with other held-out prompts: a fork of changed data measures anew.
    """
    found: list[EvalRecord] = []
    limit: int | None = None
    runs = lineage(store, run)
    for record in runs:
        same = record.prompts.held_out.sha256 == runs[0].prompts.held_out.sha256
        mine = read_evals(store, record.run) if same else []
        found += [one for one in mine if limit is None or one.policy_version <= limit]
        if record.parent is not None:
            limit = record.parent.step
    unique = {(one.policy_version, one.suite): one for one in reversed(found)}
    return [unique[key] for key in sorted(unique)]


def _state(
    store: ObjectStore, record: RunRecord, head: StepCommit | None
) -> Literal["complete", "running", "crashed", "stopped"]:
    controller = look(store, record.run, "controller")
    if controller.kind == "alive":
        return "running"
    if head is not None and head.step >= int(record.config.get("steps", 0)):
        return "complete"
    return "crashed" if controller.kind == "dead" else "stopped"


def _step(commit: StepCommit, digest: str) -> StepSummary:
    metrics = commit.metrics
    laps = [metrics.get(f"{lap}_s") for lap in ("plan", "rollout", "reward", "train")]
    return StepSummary(
        step=commit.step,
        kind=commit.kind,
        digest=digest,
        policy_version=commit.policy_version,
        policy_digest=commit.policy_digest,
        reward_mean=metrics.get("reward_mean"),
        accuracy=metrics.get("accuracy"),
        loss=metrics.get("loss"),
        grad_norm=metrics.get("grad_norm"),
        completion_tokens_mean=metrics.get("completion_tokens_mean"),
        truncated_share=metrics.get("truncated_share"),
        seconds=sum(lap for lap in laps if lap is not None) if any(laps) else None,
    )


def _evaluation(record: EvalRecord) -> EvalSummary:
    return EvalSummary(
        step=record.policy_version,
        suite=record.suite,
        accuracy=record.accuracy,
        low=record.low,
        high=record.high,
        num_prompts=record.num_prompts,
    )
