"""How a resume goes on: with which config from which step, and what becomes of the open one."""

from collections.abc import Sequence
from dataclasses import dataclass

from flows.changes import changed_config, config_as_of, newest_plan
from flows.config import RunConfig
from flows.session import Supersede
from storage.ledger import first_step, head
from storage.object_store import ObjectStore
from storage.records import RunRecord


@dataclass(frozen=True)
class Wishes:
    """What a person asks of a resume beyond more steps."""

    overrides: Sequence[str] = ()
    """`key=value`: from the next plan on, or for the open step with `redo`."""
    redo: bool = False
    """Replace the open step's plan; without overrides all its stages work afresh."""
    skip_step: bool = False
    """Commit the open step as skipped: same policy, its groups consumed."""
    reason: str | None = None
    """Why, for the plan that records it."""
    rebase: bool = False
    """Accept other bits of a replay under another environment, within tolerance."""


@dataclass(frozen=True)
class Phase:
    """Steps up to `until` under one config, with one set of engines."""

    config: RunConfig
    until: int
    supersede: Supersede | None = None
    rebase: bool = False


def phases(store: ObjectStore, record: RunRecord, wishes: Wishes, *, last: int) -> list[Phase]:
    """Returns what to do to take a run to step `last` as wished.

    An open step keeps the config of its plan: if others are wished, it is finished first, and
    engines start again for the rest.

    Raises:
        ValueError: the wishes contradict each other or the run; the message says what would do.
    """
    newest = head(store, record.run)
    commit = newest[0] if newest else None
    step = commit.step + 1 if commit else first_step(record)
    plan = newest_plan(store, record, commit)
    is_open = plan is not None and plan.step == step
    _check_wishes(wishes, record, step=step, is_open=is_open)
    now = config_as_of(record, plan)
    changed = changed_config(
        now, wishes.overrides, run=record.run, step=commit.step if commit else 0
    )
    supersede = _supersede(wishes)
    if supersede is None and is_open and changed != now:
        return [Phase(now, step, None, wishes.rebase), Phase(changed, last, None, wishes.rebase)]
    return [Phase(changed, last, supersede, wishes.rebase)]


def _supersede(wishes: Wishes) -> Supersede | None:
    if wishes.redo:
        return Supersede("train", _reason(wishes), afresh=not wishes.overrides)
    return Supersede("skipped", _reason(wishes), afresh=True) if wishes.skip_step else None


def _reason(wishes: Wishes) -> str:
    if wishes.reason:
        return wishes.reason
    changes = ", ".join(wishes.overrides)
    return f"asked for, with {changes}" if changes else "asked for"


def _check_wishes(wishes: Wishes, record: RunRecord, *, step: int, is_open: bool) -> None:
    run = record.run
    if wishes.redo and wishes.skip_step:
        raise ValueError(
            f"--redo and --skip-step exclude each other: step {step} is either done again or "
            "passed over. Name one."
        )
    if wishes.redo and not is_open:
        raise ValueError(
            f"Step {step} of run {run!r} has no plan yet, so nothing of it is to be done again. "
            f"`rollbook resume {run}` goes on; committed steps are never redone: fork before one "
            f"with `rollbook fork {run}@{max(step - 2, 0)} --run NEW`."
        )
    if wishes.skip_step and step == first_step(record):
        raise ValueError(
            f"Step {step} is the first of run {run!r} and cannot be skipped: there is no policy "
            "before it. Correct what fails there with --redo --set, or launch another run."
        )
    if wishes.reason and not (wishes.redo or wishes.skip_step):
        raise ValueError("--reason is for a step redone or skipped: add --redo or --skip-step.")
