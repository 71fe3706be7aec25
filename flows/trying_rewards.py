"""`rollbook rewards`: tries graders before a run. No Prefect, no store and no engine here."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from flows.config import RunConfig, in_one_line
from flows.limits import reward_here
from flows.overrides import overridden_reward, parse_assignment
from flows.recipes import RECIPES
from rewards import SCORERS
from rewards.contract import RewardInput, Score
from storage.records import canonical_json
from tasks.prompts.opening import read_rows
from tasks.prompts.rows import Row as DataRow
from tasks.reward.check import CheckReport, Row, check_rewards
from tasks.reward.contract import Progress, RewardConfig, RewardPart
from tasks.reward.grading import Grading
from tasks.reward.mixture import combine
from tasks.workspace import Workspace


def check_recipe(
    config: RunConfig, *, workspace: Workspace, progress: Progress | None = None
) -> CheckReport:
    """Returns what the reward of a run makes of all rows of its data sets.

    Args:
        config: names data sets and reward; its model is not looked at.
        workspace: logs go to its scratch.
        progress: told while it goes on.

    Raises:
        ValueError: data or reward are unusable; the message says what to do.
        Transient: the grading processes do not start.
    """
    rows = [
        _row(row, domain=dataset.label, system=config.prompts.system_prompt)
        for dataset in config.prompts.datasets
        for found in [read_rows(dataset)]
        for row in [*found.train, *(found.held_out or [])]
    ]
    with Grading(reward_here(config.reward), workspace=workspace, progress=progress) as grading:
        return check_rewards(config.reward, rows, grading=grading)


def try_reward(config: RewardConfig, item: RewardInput, *, workspace: Workspace) -> Score:
    """Returns what a reward says of one completion, graded where a run would grade it.

    Raises:
        ValueError: no sandbox is possible here, or an endpoint's settings are unusable.
        Transient: the grading processes do not start.
    """
    # A service that is away is a verdict too, and no failure of the trial.
    config = config.model_copy(update={"max_failed_share": 1.0})
    with Grading(reward_here(config), workspace=workspace) as grading:
        scores = grading.grade([item], config=config)
    (score,) = combine(config, scores, groups=[""])
    return score


def reward_named(name: str, assignments: Sequence[str]) -> RewardConfig:
    """Returns the reward of one grader with `option=value`, or a recipe's with `reward.key=value`.

    Raises:
        ValueError: there is neither of that name, or a value does not fit.
    """
    if name in RECIPES and name not in SCORERS:
        return overridden_reward(RECIPES[name]().reward, assignments)
    try:
        part = RewardPart(kind=name, options=dict(map(parse_assignment, assignments)))
        return RewardConfig(parts=[part], workers=1)
    except ValidationError as error:
        raise ValueError(f"The grader {name!r} does not work. {in_one_line(error)}") from error


def verdict(score: Score) -> dict[str, Any]:
    """Returns a score as plain values: `{reward, status, reason, parts}`."""
    return {
        "reward": score.value,
        "status": score.status,
        "reason": score.reason,
        "parts": [
            {
                "name": part.name,
                "value": part.value,
                "weight": part.weight,
                "status": part.status,
                "reason": part.reason,
            }
            for part in score.parts
        ],
    }


def parse_extra(text: str | None) -> Mapping[str, Any]:
    """Returns the row's further fields.

    Raises:
        ValueError: it is no JSON object.
    """
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"--extra is {text!r}. Expected a JSON object, like '{{\"level\": 3}}'.")
    return found


def _row(row: DataRow, *, domain: str, system: str | None) -> Row:
    prompt = row.prompt
    if not isinstance(prompt, str):
        prompt = "\n\n".join(turn["content"] for turn in prompt)
    if system:
        prompt = f"{system}\n\n{prompt}"
    return Row(
        row_id=f"{domain}/{row.row_id}",
        domain=domain,
        prompt=prompt,
        answer=row.answer,
        # As graders will read it from the store.
        extra=json.loads(canonical_json(dict(row.extra))),
    )
