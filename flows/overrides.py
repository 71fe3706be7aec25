"""`--set key=value`: changes a recipe's config by dotted keys, with near misses named."""

import difflib
import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from flows.config import RunConfig, in_one_line
from tasks.reward.contract import RewardConfig


def with_overrides(config: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """Returns `config` with every `key=value` applied and all of it validated again.

    A value is read as JSON where it parses (`3`, `true`, `[1,2]`), else it is the text itself.
    List items are addressed by number: `reward.parts.0.weight=2`.

    Raises:
        ValueError: no such key (near misses are named), or the value does not fit.
    """
    values = config.model_dump(mode="json")
    for assignment in assignments:
        key, value = parse_assignment(assignment)
        _assign(values, key.split("."), value, key)
    return validated(values)


def overridden_reward(config: RewardConfig, assignments: Sequence[str]) -> RewardConfig:
    """Returns how samples would be graded with every `reward.key=value` applied.

    Raises:
        ValueError: no such key, another than the reward's, or a value that does not fit.
    """
    values = {"reward": config.model_dump(mode="json")}
    for assignment in assignments:
        key, value = parse_assignment(assignment)
        if not key.startswith("reward."):
            raise ValueError(
                f"--set {assignment!r} changes no reward. Expected reward.key=value: what was "
                "sampled and trained is a fact, and only its grading can be tried another way."
            )
        _assign(values, key.split("."), value, key)
    try:
        return RewardConfig.model_validate(values["reward"])
    except ValidationError as error:
        raise ValueError(f"The reward does not work. {in_one_line(error)}") from error


def validated(values: dict[str, Any]) -> RunConfig:
    """Returns the RunConfig of plain values.

    Raises:
        ValueError: names every field that does not fit, in one line.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"The config does not work. {in_one_line(error)}") from error


def parse_assignment(assignment: str) -> tuple[str, Any]:
    """Returns key and value of `key=value`; a value is JSON where it parses, else text.

    Raises:
        ValueError: there is no value, or one that JSON has no word for.
    """
    key, mark, text = assignment.partition("=")
    if not mark:
        raise ValueError(f"--set {assignment!r} has no value. Expected --set key=value.")
    return key.strip(), _parse(text)


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError:
        return text
    except RecursionError as error:
        raise ValueError("A --set value is nested too deeply to be read as JSON.") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(
        f"--set takes no {name}: a run is stored as JSON, which has no such number. Expected a "
        f"finite number; a text of that name stands in quotes: '\"{name}\"'."
    )


def _assign(values: Any, path: list[str], value: Any, key: str) -> None:
    head, rest = path[0], path[1:]
    slot = _slot(values, head, key)
    if rest:
        _assign(values[slot], rest, value, key)
    else:
        values[slot] = value


def _slot(values: Any, name: str, key: str) -> Any:
    if isinstance(values, list) and name.isdigit() and int(name) < len(values):
        return int(name)
    free_form = isinstance(values, dict) and key.rpartition(".")[0].endswith(("options", "suites"))
    if isinstance(values, dict) and (name in values or free_form):
        return name
    known = sorted(values) if isinstance(values, dict) else []
    raise ValueError(f"There is no setting {key!r}. {_near(name, known, key)}")


def _near(name: str, known: list[str], key: str) -> str:
    everywhere = _all_keys(RunConfig)
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    prefix = key.rpartition(".")[0]
    candidates = [f"{prefix}.{match}" if prefix else match for match in close]
    last = key.rpartition(".")[2]
    candidates += [full for full in everywhere if full.rpartition(".")[2] == last]
    candidates += difflib.get_close_matches(key, everywhere, n=3, cutoff=0.6)
    unique = list(dict.fromkeys(candidates))[:3]
    if unique:
        return f"Did you mean {' or '.join(unique)}?"
    return f"Expected one of: {', '.join(known)}." if known else "It has no parts."


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += _all_keys(inner, f"{prefix}{name}.")
    return keys


def near_names(name: str, known: Sequence[str]) -> str:
    """Returns a hint at the names close to `name`, or all of them."""
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Expected one of: {', '.join(known)}."
