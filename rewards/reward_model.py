"""Reward model: a logit of a sequence-classification model served by vLLM (`/pooling`)."""

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rewards.answer import visible_text
from rewards.contract import (
    Endpoint,
    EndpointConfig,
    GoldExample,
    Refused,
    RewardInput,
    Score,
)
from rewards.template import (
    check_template,
    fill,
    missing_question,
    question,
    quoted,
    whole,
    without_marks,
)

NEEDS: Literal["endpoint"] = "endpoint"
SERVES: Literal["classify"] = "classify"
GOLD: Sequence[GoldExample] = ()

# Not /classify: its JSON has no word for a logit that is not finite, and one such sample makes the
# server answer 500 to the whole batch. Not /score: it serves models with one label only.
_PATH = "/pooling"
_PLAIN = "{prompt}{completion}"


class Config(EndpointConfig):
    """What the model reads, and how its logit becomes a reward."""

    template: str = _PLAIN
    """Of the text that is scored, with {prompt} and {completion}: the policy's own, special tokens
    included, without the end mark. Write what the model was trained on: `...<|im_end|>`."""
    messages: bool = False
    """Send turns instead, so that the model's own chat template makes the text; one request a
    sample."""
    prompt_field: str | None = None
    """Key of the prompt's extra that holds the question; None: the prompt's text."""
    add_special_tokens: bool = False
    """Let the tokenizer add its begin and end to the text."""
    show_thinking: bool = True
    """Show what stands inside `<think>`."""
    label: Annotated[int, Field(ge=0)] = 0
    """Which of the model's logits."""
    activation: Literal["none", "sigmoid"] = "none"
    scale: float = 1.0
    """The reward is scale x activation(logit) + shift."""
    shift: float = 0.0
    truncate: Literal["left", "right"] | None = None
    """Where a text that is too long for the model loses tokens (reason `input_truncated`); None:
    it is a `grader_error`."""
    batch: Annotated[int, Field(gt=0)] = 16
    """Texts in one request."""

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        check_template(self.template, allowed=("prompt", "completion"), needed=("completion",))
        if self.messages and self.template != _PLAIN:
            raise ValueError("With messages the model's chat template decides. Leave template out.")
        if not self.scale:
            raise ValueError("scale is 0: every reward would be the shift. Expected another.")
        return self


def batch_items(config: Config) -> int:
    """Returns how many texts go into one request."""
    return 1 if config.messages else config.batch


def score_batch(
    items: Sequence[RewardInput], config: Config, endpoint: Endpoint
) -> Sequence[Score]:
    """Returns the model's reward of every item; a refused text costs only itself.

    Where the service refuses a request of several texts, each is sent alone.
    """
    scores: dict[int, Score] = {}
    for index, item in enumerate(items):
        if problem := _problem(item, config):
            scores[index] = Score(None, "grader_error", problem)
    open_ = [index for index in range(len(items)) if index not in scores]
    size = batch_items(config)
    for start in range(0, len(open_), size):
        part = open_[start : start + size]
        graded = _score_together([items[index] for index in part], config, endpoint)
        scores |= dict(zip(part, graded, strict=True))
    return [scores[index] for index in range(len(items))]


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns what the row lacks, or None; a reward model needs no gold answer."""
    return missing_question(extra, config.prompt_field)


def _problem(item: RewardInput, config: Config) -> str | None:
    problem = check_gold(item.answer, item.extra, config)
    if problem is None and not config.messages and not _text(item, config):
        return "there is no text to score: prompt and completion are empty"
    return problem


def _score_together(
    items: Sequence[RewardInput], config: Config, endpoint: Endpoint
) -> Sequence[Score]:
    if len(items) == 1:
        return [_score_alone(items[0], config, endpoint)]
    try:
        logits = _logits(items, config, endpoint)
    except (Refused, ValueError):
        return [_score_alone(item, config, endpoint) for item in items]
    return [_score(each, config) for each in logits]


def _score_alone(item: RewardInput, config: Config, endpoint: Endpoint) -> Score:
    try:
        return _score(_logits([item], config, endpoint)[0], config)
    except Refused as error:
        if config.truncate is None:
            return Score(None, "grader_error", str(error))
    except ValueError as error:
        return Score(None, "grader_error", str(error))
    try:
        [logits] = _logits([item], config, endpoint, truncate=config.truncate)
    except (Refused, ValueError) as error:
        return Score(None, "grader_error", str(error))
    return _score(logits, config, reason="input_truncated")


def _logits(
    items: Sequence[RewardInput],
    config: Config,
    endpoint: Endpoint,
    *,
    truncate: str | None = None,
) -> list[Sequence[float]]:
    """Returns each item's logits; raises what `Endpoint.post` does."""
    body: dict[str, Any] = {
        "task": "classify",
        "use_activation": False,
        "encoding_format": "base64",
        "embed_dtype": "float32",
        "endianness": "little",
        "add_special_tokens": config.add_special_tokens,
    }
    if config.messages:
        [item] = items
        body["messages"] = _turns(item, config)
    else:
        body["input"] = [_text(item, config) for item in items]
    if truncate is not None:
        body |= {"truncate_prompt_tokens": -1, "truncation_side": truncate}
    return endpoint.post(_PATH, body, read=lambda answer: _read_logits(answer, len(items)))


def _text(item: RewardInput, config: Config) -> str:
    fields = {"prompt": question(item, config.prompt_field), "completion": _shown(item, config)}
    return whole(fill(config.template, fields))


def _turns(item: RewardInput, config: Config) -> list[dict[str, str]]:
    texts = {"user": question(item, config.prompt_field), "assistant": _shown(item, config)}
    return [{"role": role, "content": without_marks(whole(text))} for role, text in texts.items()]


def _shown(item: RewardInput, config: Config) -> str:
    if config.show_thinking:
        return item.completion
    return visible_text(item.completion, prompt=item.prompt).strip()


def _score(logits: Sequence[float], config: Config, *, reason: str | None = None) -> Score:
    if config.label >= len(logits):
        problem = f"the model has {len(logits)} labels, and `label` is {config.label}"
        return Score(None, "grader_error", problem)
    logit = logits[config.label]
    value = config.scale * _activated(logit, config) + config.shift
    if not math.isfinite(value):
        return Score(None, "grader_error", f"the model's logit is {logit}, the reward {value}")
    return Score(value, reason=reason)


def _activated(logit: float, config: Config) -> float:
    if config.activation == "none":
        return logit
    # tanh neither overflows nor loses a NaN.
    return 0.5 * (1.0 + math.tanh(0.5 * logit))


def _read_logits(answer: Any, count: int) -> list[Sequence[float]]:
    """Returns the logits by index; raises ValueError unless there is one row per text."""
    try:
        rows = {row["index"]: _floats(row["data"]) for row in answer["data"]}
        complete = len(answer["data"]) == count and sorted(rows) == list(range(count))
    except (KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
        raise ValueError(
            f"the reward model's answer has no logits ({type(error).__name__}): {quoted(answer)}"
        ) from error
    if not complete:
        raise ValueError(
            f"the reward model answered {len(answer['data'])} rows for {count} texts. Expected one "
            "for each, by index."
        )
    return [rows[index] for index in range(count)]


def _floats(packed: Any) -> Sequence[float]:
    if isinstance(packed, str):
        raw = base64.b64decode(packed, validate=True)
        return struct.unpack(f"<{len(raw) // 4}f", raw)
    # A server that knows no encodings: plain numbers.
    return [float(each) for each in packed]
