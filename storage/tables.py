"""Runs, commits and evaluations as Arrow tables, one row per record.

A fork's rows are its own: those of its parent up to `parent_step` stand under the parent's name.
Shards are no business of this file (`sample_tables`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from storage.errors import NotFound
from storage.layout import plan_revision_of_key
from storage.ledger import (
    commits,
    first_step,
    head,
    list_runs,
    read_commit,
    read_evals,
    read_plan,
    read_run,
)
from storage.object_store import ObjectStore
from storage.records import EvalRecord, RunRecord, StepCommit, canonical_json

READERS = 16
"""Records read at once; they are small, and an S3 store answers each in milliseconds."""

_METRICS = pa.map_(pa.string(), pa.float64())
_MOMENT = pa.timestamp("us")
"""UTC, without a zone: engines then need no calendar to read it."""

RUNS = pa.schema(
    [
        ("run", pa.string()),
        ("recipe", pa.string()),
        ("created_at", _MOMENT),
        ("parent_run", pa.string()),
        ("parent_step", pa.int64()),
        ("train_prompts", pa.int64()),
        ("held_out_prompts", pa.int64()),
        ("mixture_digest", pa.string()),
        ("model_digest", pa.string()),
        ("launch_id", pa.string()),
        ("config", pa.string()),
    ]
)
"""One row per run; `config` is JSON, as of the launch."""

STEPS = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int64()),
        ("kind", pa.string()),
        ("policy_version", pa.int64()),
        ("policy_digest", pa.string()),
        ("committed_at", _MOMENT),
        ("metrics", _METRICS),
        ("prompts_drawn", pa.int64()),
        ("revision", pa.int64()),
        ("reason", pa.string()),
        ("rebased_steps", pa.list_(pa.int64())),
        ("rebased_max_abs_diff", pa.float64()),
        ("parent_run", pa.string()),
        ("signed_by", pa.string()),
        ("state_id", pa.string()),
        ("attempt", pa.string()),
        ("previous", pa.string()),
        ("digest", pa.string()),
    ]
)
"""One row per commit; `revision` and `reason` are its plan's, where that was changed or skipped."""

EVALS = pa.schema(
    [
        ("run", pa.string()),
        ("version", pa.int64()),
        ("suite", pa.string()),
        ("accuracy", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("reward_mean", pa.float64()),
        ("num_prompts", pa.int64()),
        ("num_samples", pa.int64()),
        ("num_graded", pa.int64()),
        ("policy_digest", pa.string()),
        ("metrics", _METRICS),
    ]
)
"""One row per evaluated policy version and suite; `low`, `high` bound the accuracy at 95%."""


@dataclass(frozen=True)
class CommittedStep:
    """A commit and the digest of its bytes."""

    commit: StepCommit
    digest: str


def read_runs(store: ObjectStore, runs: Sequence[str] | None) -> list[RunRecord]:
    """Returns the records of the named runs, or of all.

    Raises:
        NotFound: there is no run of that name.
    """
    names = list_runs(store) if runs is None else runs
    return [read_run(store, run)[0] for run in dict.fromkeys(names)]


def read_steps(store: ObjectStore, run: str) -> list[CommittedStep]:
    """Returns all commits of a run, several read at once; the chain is checked.

    Raises:
        NotFound: there is no such run.
        Corrupt: the chain breaks or has a hole; the message names the step.
    """
    record, digest = read_run(store, run)
    newest = head(store, run)
    if newest is None:
        return []
    earlier = range(first_step(record), newest[0].step)
    found = [*_at_once(lambda step: _commit_or_none(store, run, step), earlier), newest]
    whole = [pair for pair in found if pair is not None]
    expected = [digest, *(digest for _, digest in whole[:-1])]
    if len(whole) < len(found) or [commit.previous for commit, _ in whole] != expected:
        # One after the other: that reading says where the chain breaks.
        whole = list(commits(store, run))
    return [CommittedStep(commit, digest) for commit, digest in whole]


def runs_table(records: Sequence[RunRecord]) -> pa.Table:
    """Returns one row per run."""
    return pa.Table.from_pylist([_run_row(record) for record in records], schema=RUNS)


def steps_table(store: ObjectStore, steps: Sequence[CommittedStep]) -> pa.Table:
    """Returns one row per commit; only plans that were changed or skipped are read.

    Raises:
        NotFound: such a plan is gone.
        Corrupt: it is not what the commit names.
    """
    rows = _at_once(lambda step: _step_row(store, step), steps)
    return pa.Table.from_pylist(rows, schema=STEPS)


def evals_table(records: Sequence[EvalRecord]) -> pa.Table:
    """Returns one row per evaluated version and suite."""
    return pa.Table.from_pylist([_eval_row(record) for record in records], schema=EVALS)


def read_all_evals(store: ObjectStore, records: Sequence[RunRecord]) -> list[EvalRecord]:
    """Returns the evaluations of these runs."""
    return [found for record in records for found in read_evals(store, record.run)]


def _commit_or_none(store: ObjectStore, run: str, step: int) -> tuple[StepCommit, str] | None:
    try:
        return read_commit(store, run, step)
    except NotFound:
        return None


def _run_row(record: RunRecord) -> dict[str, Any]:
    return {
        "run": record.run,
        "recipe": record.config.get("recipe"),
        "created_at": _moment(record.created_at),
        "parent_run": record.parent.run if record.parent else None,
        "parent_step": record.parent.step if record.parent else None,
        "train_prompts": record.prompts.train.rows,
        "held_out_prompts": record.prompts.held_out.rows,
        "mixture_digest": record.prompts.mixture_digest,
        "model_digest": record.model.digest,
        "launch_id": record.launch_id,
        "config": canonical_json(record.config).decode(),
    }


def _step_row(store: ObjectStore, step: CommittedStep) -> dict[str, Any]:
    commit = step.commit
    revision = plan_revision_of_key(commit.plan.key) or 0
    told = revision > 0 or commit.kind == "skipped"
    rebased, parent, signature = commit.rebased, commit.parent, commit.signature
    return {
        **commit.model_dump(include=set(STEPS.names) & set(StepCommit.model_fields) - {"metrics"}),
        "committed_at": _moment(commit.committed_at),
        "metrics": _metrics(commit.metrics),
        "prompts_drawn": commit.cursor.drawn,
        "revision": revision,
        "reason": read_plan(store, commit.plan).reason if told else None,
        "rebased_steps": rebased.steps if rebased else None,
        "rebased_max_abs_diff": rebased.max_abs_diff if rebased else None,
        "parent_run": parent.run if parent else None,
        "signed_by": signature.public_key if signature else None,
        "digest": step.digest,
    }


def _eval_row(record: EvalRecord) -> dict[str, Any]:
    return {
        **record.model_dump(include=set(EVALS.names) - {"metrics"}),
        "version": record.policy_version,
        "metrics": _metrics(record.metrics),
    }


def _metrics(found: Mapping[str, float | None]) -> list[tuple[str, float | None]]:
    return sorted(found.items())


def _moment(text: str) -> datetime | None:
    """Returns a recorded time in UTC; what is no time has none, and no query fails of it."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment


def _at_once(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(READERS, thread_name_prefix="records") as pool:
        return list(pool.map(function, items))
