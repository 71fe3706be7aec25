"""What may change about a run after its launch, and what makes another run of it."""

from collections.abc import Sequence

from flows.config import RunConfig
from flows.limits import check_pythons
from flows.overrides import validated, with_overrides
from storage.ledger import current_plan, first_step, read_plan
from storage.object_store import ObjectStore
from storage.records import Plan, RunRecord, StepCommit

OF_THE_DATA = ("datasets", "system_prompt", "template", "max_prompt_tokens")
"""Settings of `prompts` that decide which prompts there are; they were stored at launch."""


def config_as_of(record: RunRecord, plan: Plan | None) -> RunConfig:
    """Returns the config that a plan was made with; the run's own before its first plan.

    Raises:
        ValueError: this version cannot read it.
    """
    return validated({**record.config, **(plan.configs if plan else {})})


def newest_plan(store: ObjectStore, record: RunRecord, commit: StepCommit | None) -> Plan | None:
    """Returns the plan of the step after `commit`, the run's newest, or else that of `commit`."""
    step = commit.step + 1 if commit else first_step(record)
    found = current_plan(store, record.run, step)
    if found is not None:
        return found[0]
    return read_plan(store, commit.plan) if commit else None


def changed_config(
    config: RunConfig, assignments: Sequence[str], *, run: str, step: int
) -> RunConfig:
    """Returns the config that a run goes on with; its plans record it from the next one on.

    Args:
        config: what the run's last plan was made with.
        assignments: `key=value`, as for a launch.
        run: its name, for messages.
        step: its last committed step, for messages.

    Raises:
        ValueError: no such setting, a value that does not fit, or a setting that makes another run:
            the message offers a fork.
    """
    changed = with_overrides(config, assignments)
    if changed.steps != config.steps:
        raise ValueError(
            f"steps is not changed by --set on a run that exists. Say how many more: `rollbook "
            f"resume {run} --steps N`."
        )
    fixed = [*(["seed"] if changed.seed != config.seed else []), *data_changes(config, changed)]
    if changed.model != config.model:
        raise ValueError(
            f"model belongs to what run {run!r} is: its policies continue the base model that it "
            "was launched with. Expected settings of how it goes on. Launch another run with "
            "this model."
        )
    if fixed:
        raise ValueError(
            f"{', '.join(fixed)} decide which prompts run {run!r} draws, and its cursor counts "
            "in them: changed in mid-run, prompts would be lost or repeated. Continue it under "
            f"another name instead: `rollbook fork {run}@{step} --run NEW "
            f"{' '.join(f'--set {assignment}' for assignment in assignments)}`."
        )
    check_pythons(changed)
    return changed


def data_changes(config: RunConfig, changed: RunConfig) -> list[str]:
    """Returns which settings that decide the prompts differ."""
    before, after = config.prompts, changed.prompts
    names = [name for name in OF_THE_DATA if getattr(before, name) != getattr(after, name)]
    return [f"prompts.{name}" for name in names]
