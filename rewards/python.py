"""A function of the user's, of TRL's or of verl's shape, called unchanged.

It is asked for one sample at a time, also where its shape takes lists: a score depends on its
sample alone. A function that compares the samples of a list sees lists of one.
"""

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from rewards.contract import GoldExample, RewardInput, Score, ScorerConfig
from rewards.python_loading import code_digest, load_function
from rewards.python_shapes import (
    MARKS,
    NOT_HERE,
    Shape,
    batch_arguments,
    number,
    only,
    reason,
    score_of,
    trl_arguments,
    verl_arguments,
)

_SHAPES = (
    "TRL's `f(completions, answer, **columns) -> list[float | None]` or verl's "
    "`f(data_source, solution_str, ground_truth, extra_info=None) -> float`"
)


class Config(ScorerConfig):
    """Which function, and how it is called."""

    function: str
    """`package.module:function`, or `folder/file.py:function`. Module and relative path are looked
    for where rollbook was started, on every machine that grades: an installed module travels."""
    shape: Literal["auto"] | Shape = "auto"
    """How it is called; `auto`: by the names of its arguments."""
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of its own (verl's `reward_kwargs`)."""
    answer_column: str | None = None
    """TRL: what the function calls the gold answer, besides `answer`: `solution`, say."""
    conversational: bool | Literal["auto"] = "auto"
    """TRL: whether a completion is a list with one assistant turn, and a prompt the turns that the
    row's field `prompt` holds (a data set keeps it with `extra_fields`). `auto`: if it has them."""

    @model_validator(mode="after")
    def _function_can_be_called(self) -> "Config":
        function = _open(self.function, self.shape)
        _check_arguments(function, self)
        _OPENED[self.function, self.shape] = function
        return self


@dataclass(frozen=True, slots=True)
class _Function:
    """The user's function, its shape, and the names of its arguments."""

    call: Callable[..., Any]
    name: str
    shape: Shape
    takes: frozenset[str]
    requires: frozenset[str]
    takes_any: bool


# A sample must not pay for a look at the disk.
_OPENED: dict[tuple[str, str], _Function] = {}

_EXAMPLES = "rewards.python_examples"
GOLD: Sequence[GoldExample] = (
    GoldExample(RewardInput("58", answer="58"), {"function": f"{_EXAMPLES}:equals_answer"}),
    GoldExample(
        RewardInput("27 + 31 #### 58", extra={"reward_model": {"ground_truth": 58}}),
        {"function": f"{_EXAMPLES}:compute_score"},
    ),
    GoldExample(
        RewardInput("Answer: 58", answer="58"),
        {"function": f"{_EXAMPLES}:compute_score", "kwargs": {"mark": "Answer:"}},
    ),
    GoldExample(RewardInput("#### 58", answer="58"), {"function": f"{_EXAMPLES}:compute_scores"}),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns what the function says of the sample.

    TRL's None is `not_applicable`: the function has no say on this sample. What it logs, and what
    verl's dictionaries hold beside `score`, becomes the reason (`acc=1, pred=58`).

    Raises:
        ValueError: it returned no finite number, or tried to end the process.
        Exception: whatever the function raised.
    """
    function = _opened(config)
    said: dict[str, Any] = {}
    arguments = _arguments(function.shape, item, config, said)
    missing = _missing(function, arguments)
    if missing is not None:
        return Score(None, "grader_error", missing)
    result = _call(function, arguments)
    if function.shape != "verl":
        result = only(result, name=function.name)
    if function.shape != "trl":
        result = score_of(result, said, name=function.name)
    elif result is None:
        return Score(None, "not_applicable", f"{function.name} returned None")
    return Score(number(result, name=function.name), reason=reason(said))


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns which argument of the function this row has nothing for, or None."""
    function = _opened(config)
    row = RewardInput("", answer=answer, extra=extra)
    return _missing(function, _arguments(function.shape, row, config, {}))


def describe(config: Config) -> dict[str, str]:
    """Returns the digest of the function's code, for the record's environment.

    Raises:
        ValueError: the code is not there any more.
    """
    return {f"reward:{config.function}": code_digest(config.function)}


def _opened(config: Config) -> _Function:
    key = (config.function, config.shape)
    if key not in _OPENED:  # The config was unpickled, not validated, in this process.
        _OPENED[key] = _open(*key)
    return _OPENED[key]


def _open(name: str, shape: Literal["auto"] | Shape) -> _Function:
    function = load_function(name)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise ValueError(f"{name} does not name its arguments. Expected {_SHAPES}.") from error
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [parameter for parameter in parameters if parameter.kind in by_name]
    takes = frozenset(parameter.name for parameter in named)
    return _Function(
        function,
        name,
        _shape(name, takes) if shape == "auto" else shape,
        takes,
        frozenset(parameter.name for parameter in named if parameter.default is parameter.empty),
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
    )


def _shape(name: str, takes: frozenset[str]) -> Shape:
    shapes: list[Shape] = [shape for shape, mark in MARKS.items() if mark in takes]
    if len(shapes) == 1:
        return shapes[0]
    found = "more than one shape" if shapes else "no shape that is known"
    raise ValueError(
        f"{name} takes ({', '.join(sorted(takes))}): {found}. Expected {_SHAPES}. Set `shape` if "
        "it is one of them."
    )


def _check_arguments(function: _Function, config: Config) -> None:
    name, mark = function.name, MARKS[function.shape]
    for argument in (mark, *sorted(config.kwargs)):
        if argument not in function.takes and not function.takes_any:
            raise ValueError(
                f"{name} takes no argument {argument!r}. Found ({', '.join(sorted(function.takes))}"
                "). Check `kwargs` and `shape`."
            )
    required = function.requires - config.kwargs.keys()
    for argument in sorted(required & NOT_HERE.keys()):
        raise ValueError(
            f"{name} requires {argument!r}, {NOT_HERE[argument]}, and a score depends on its "
            "sample alone. Give the argument a default, or a value in `kwargs`."
        )
    given = _arguments(function.shape, RewardInput("", answer=""), config, {})
    missing = sorted(required - given.keys())
    # What TRL's shape requires may be a column of the data: `check_gold` looks.
    if missing and function.shape != "trl":
        raise ValueError(
            f"{name} requires {missing[0]!r}, which verl does not pass. Set it in `kwargs`."
        )


def _arguments(
    shape: Shape, item: RewardInput, config: Config, said: dict[str, Any]
) -> dict[str, Any]:
    """Returns all that functions of this shape may take; what they log is put into `said`."""
    if shape == "verl":
        given = verl_arguments(item)
    elif shape == "verl_batch":
        given = batch_arguments(item)
    else:
        given = trl_arguments(
            item,
            said,
            answer_column=config.answer_column,
            conversational=config.conversational,
        )
    return given | config.kwargs


def _missing(function: _Function, arguments: Mapping[str, Any]) -> str | None:
    missing = sorted(function.requires - arguments.keys())
    if not missing:
        return None
    if missing[0] == "prompts":
        hint = "keep its turns with extra_fields=['prompt'], or set conversational=false"
    elif function.shape == "trl":
        hint = "keep it with extra_fields, or set answer_column if it is the gold answer"
    else:
        hint = "it is reward_model.ground_truth, or the answer"
    return f"{function.name} requires {missing[0]!r}, which the row does not have: {hint}"


def _call(function: _Function, arguments: Mapping[str, Any]) -> Any:
    # Copies: what a function does to its arguments must not reach the next sample. The token ids,
    # long and made for this call, are one already.
    taken = {
        name: value if name == "completion_ids" else copy.deepcopy(value)
        for name, value in arguments.items()
        if function.takes_any or name in function.takes
    }
    try:
        return _finished(function.call(**taken))
    except (SystemExit, asyncio.CancelledError) as error:
        # These are no Exceptions: the grading process would end without a word.
        raise ValueError(f"{function.name} raised {error!r}. Expected it to return.") from error


def _finished(result: Any) -> Any:
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
