"""What a service asks the store before it serves a request: does this run ask for this work?

A service spends GPU time and writes into a bucket for whoever has its token, so a token is not
enough. What a stage checks beyond this is in its own `admission.py`.
"""

from dataclasses import dataclass
from typing import Any

from storage.errors import NotFound
from storage.layout import EvalScope, StepScope
from storage.ledger import current_plan, read_commit, read_run, stage_records
from storage.object_store import ObjectStore
from storage.records import ObjectRef, Plan, RunRecord, StepCommit
from tasks.errors import Permanent


@dataclass(frozen=True)
class OpenStep:
    """What the store says of a step that is planned and not committed."""

    record: RunRecord
    plan: Plan
    last: StepCommit | None
    """The commit before it; None for the first step."""


def check_run(asked: str, *, served: str) -> None:
    """Checks that a request is of the run that this service is for.

    Raises:
        Permanent: it is of another one.
    """
    if asked != served:
        raise Permanent(
            f"This service serves run {served!r}, and the request is of run {asked!r}. Expected "
            "requests of its own run: start a service for the other one."
        )


def open_step(store: ObjectStore, scope: StepScope) -> OpenStep:
    """Returns what the store says of the step that a request is of.

    Raises:
        Permanent: there is no such run or plan, or the step is committed already.
    """
    try:
        record, _ = read_run(store, scope.run)
    except NotFound as error:
        raise Permanent(f"There is no run {scope.run!r} in {store.uri}: {error}") from error
    if committed(store, scope) is not None:
        raise Permanent(
            f"Step {scope.step} of run {scope.run!r} is committed, so this request is a repetition "
            "of an old one. Expected requests of the open step; nothing was done."
        )
    found = current_plan(store, scope.run, scope.step)
    if found is None:
        raise Permanent(
            f"Step {scope.step} of run {scope.run!r} has no plan in {store.uri}. Expected the plan "
            "before its requests; nothing was done."
        )
    before = StepScope(run=scope.run, step=scope.step - 1)
    return OpenStep(record, found[0], committed(store, before) if scope.step else None)


def committed(store: ObjectStore, scope: StepScope) -> StepCommit | None:
    """Returns the commit of a step, or None."""
    try:
        return read_commit(store, scope.run, scope.step)[0]
    except NotFound:
        return None


def check_named(
    store: ObjectStore, scope: StepScope | EvalScope, stage: str, output: str, ref: ObjectRef
) -> None:
    """Checks that a record of that stage, here, names a shard.

    Raises:
        Permanent: none does.
    """
    if not any(found.outputs.get(output) == ref for found in stage_records(store, scope, stage)):
        raise Permanent(
            f"No {stage} record of {scope.prefix} names {ref.key} ({ref.sha256[:16]}). Expected "
            "experience that was stored and recorded; nothing was done."
        )


def expect(found: Any, expected: Any, *, what: str, where: str) -> None:
    """Checks one thing that a request says against what the store says.

    Raises:
        Permanent: they differ.
    """
    if found != expected:
        raise Permanent(
            f"The request's {what} is not what {where} says: expected {_short(expected)}, found "
            f"{_short(found)}. Nothing was done."
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
