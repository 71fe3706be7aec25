"""What may change about a run after its launch, and what makes another run of it."""

from collections.abc import Sequence

from flows.config import RunConfig
from flows.limits import check_pythons
from flows.overrides import with_overrides

OF_THE_DATA = ("datasets", "system_prompt", "template", "max_prompt_tokens")
"""Settings of `prompts` that decide which prompts there are; they were stored at launch."""


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
