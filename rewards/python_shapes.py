"""What functions of the TRL and the verl shape are given of a sample, and what they give back."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, cast

from rewards.contract import RewardInput
from rewards.template import one_line

Shape = Literal["trl", "verl", "verl_batch"]

MARKS: Mapping[Shape, str] = {
    "trl": "completions",
    "verl": "solution_str",
    "verl_batch": "solution_strs",
}
"""The argument that gives a shape away."""

NOT_HERE = {
    "trainer_state": "the state of a trainer",
    "environments": "environments",
    "reward_router_address": "the address of a reward model",
    "reward_model_tokenizer": "the tokenizer of a reward model",
}
"""What TRL and verl may pass beside the sample, and nothing here does."""

_VALUE_CHARACTERS = 40
_REASON_CHARACTERS = 200


def trl_arguments(
    item: RewardInput,
    said: dict[str, Any],
    *,
    answer_column: str | None,
    conversational: bool | Literal["auto"],
) -> dict[str, Any]:
    """Returns what TRL's trainers pass: texts, tokens and the row's columns, in lists of one.

    Args:
        item: the sample.
        said: what the function logs is put there.
        answer_column: a further name of the gold answer.
        conversational: whether completions and prompts are turns; `auto`: if the row has turns.
    """
    columns = {name: [value] for name, value in item.extra.items() if name != "prompt"}
    if item.answer is not None:
        columns = {"answer": [item.answer], **columns}
        if answer_column is not None:
            columns[answer_column] = [item.answer]

    def log_extra(column: str, values: Sequence[Any]) -> None:
        said[column] = values[0] if len(values) == 1 else values

    def log_metric(name: str, value: Any) -> None:
        said[name] = value

    return {
        **columns,
        **_texts(item, conversational=conversational),
        "completion_ids": [list(item.token_ids)],
        "log_extra": log_extra,
        "log_metric": log_metric,
    }


def _texts(item: RewardInput, *, conversational: bool | Literal["auto"]) -> dict[str, Any]:
    prompt = item.extra.get("prompt")
    has_turns = isinstance(prompt, list)
    if conversational is False or (conversational == "auto" and not has_turns):
        text = prompt if isinstance(prompt, str) else item.prompt or ""
        return {"prompts": [text], "completions": [item.completion]}
    turns = [{"role": "assistant", "content": item.completion}]
    # Without turns no prompts: the templated text could be taken for the question.
    return {"completions": [turns]} | ({"prompts": [prompt]} if has_turns else {})


def verl_arguments(item: RewardInput) -> dict[str, Any]:
    """Returns what verl's reward managers pass; no `ground_truth` where the row has none."""
    model = item.extra.get("reward_model")
    row = cast(Mapping[str, Any], model) if isinstance(model, Mapping) else {}
    # The managers add the last two; these are their values for an answer of one turn.
    info = {**(item.extra.get("extra_info") or {}), "num_turns": None, "rollout_reward_scores": {}}
    arguments: dict[str, Any] = {
        "data_source": item.extra.get("data_source", item.domain),
        "solution_str": item.completion,
        "extra_info": info,
    }
    if "ground_truth" in row or item.answer is not None:
        arguments["ground_truth"] = row.get("ground_truth", item.answer)
    return arguments


def batch_arguments(item: RewardInput) -> dict[str, Any]:
    """Returns what verl's batch reward manager passes, in lists of one."""
    return {f"{name}s": [value] for name, value in verl_arguments(item).items()}


def only(result: Any, *, name: str) -> Any:
    """Returns the one item of the list that the function `name` of lists gave for one sample.

    Raises:
        ValueError: it is no list, or not of one.
    """
    plain = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(plain, list | tuple):
        raise ValueError(f"{name} returned {_shown(result)}. Expected a list of scores.")
    items = cast(Sequence[Any], plain)
    if len(items) != 1:
        raise ValueError(
            f"{name} returned {len(items)} scores for one completion. Expected a score for each."
        )
    return items[0]


def score_of(result: Any, said: dict[str, Any], *, name: str) -> Any:
    """Returns verl's `score`; what else a dictionary holds goes to `said`.

    Raises:
        ValueError: a dictionary has no `score`.
    """
    if not isinstance(result, Mapping):
        return result
    entries = cast(Mapping[str, Any], result)
    if "score" not in entries:
        raise ValueError(
            f"{name} returned a dictionary with the keys {sorted(map(str, entries))}. Expected "
            "'score' among them."
        )
    said.update((key, value) for key, value in entries.items() if key != "score")
    return entries["score"]


def number(value: Any, *, name: str) -> float:
    """Returns `value` as a float: a number, a truth value, or a scalar of numpy or torch.

    Raises:
        ValueError: it is none of these, or not finite.
    """
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, Real):
        raise ValueError(f"{name} returned {_shown(value)}. Expected a number.")
    try:
        found = float(plain)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name} returned {_shown(value)}. Expected a finite number.")
    return found


def reason(said: Mapping[str, Any]) -> str | None:
    """Returns what a function said beside its score, in short: `acc=1, pred=58`."""
    text = ", ".join(f"{name}={_word(value)}" for name, value in said.items())
    return one_line(text, limit=_REASON_CHARACTERS) or None


def _word(value: Any) -> str:
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(plain, bool | float):
        return f"{plain:g}"
    return one_line(str(plain), limit=_VALUE_CHARACTERS)


def _shown(value: Any) -> str:
    return f"{one_line(repr(value), limit=_VALUE_CHARACTERS)} ({type(value).__name__})"
