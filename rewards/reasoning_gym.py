"""Tasks of reasoning-gym, by their own verifiers, strictly: only a verdict of exactly 1.0 counts.

Nothing that a model wrote reaches Python's `eval`, which several of those verifiers call.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from rewards.answer import AnswerConfig, answer_text
from rewards.contract import GoldExample, RewardInput, Score

REFUSED: Mapping[str, str] = {
    "boxnet": "it stores no answer on which its verifier could be tried",
    "coin_flip": "its verifier takes 0 for every probability below 0.0001",
    "composite": "its tasks belong to other data sets: draw from those",
    "game_of_life_halting": "its verifier accepts every text that is not empty",
    "propositional_logic": "its verifier accepts a premise repeated as the conclusion",
    "puzzle24": "its verifier accepts any four numbers that make 24, not only the task's",
    "rush_hour": "it stores no answer on which its verifier could be tried",
}
"""Data sets of reasoning-gym 0.1.25 whose rewards would teach nothing, each with the reason."""

_EXAMPLES: Mapping[str, str] = {
    "graph_color": "possible_answer",
    "rubiks_cube": "example_correct_answer",
}
"""Where the metadata hold a known good answer of tasks that every valid answer solves."""

_ACCEPTED: Mapping[str, Callable[[str, Mapping[str, Any]], Sequence[str]]] = {
    "binary_matrix": lambda oracle, metadata: [oracle],
    "n_queens": lambda oracle, metadata: metadata["valid_answers"],
    "spiral_matrix": lambda oracle, metadata: [oracle],
    "string_insertion": lambda oracle, metadata: [oracle],
}
"""All texts that get 1.0 where the verifier would evaluate any other one, for part credit."""

# Atomic: a number could be split into numbers in exponentially many ways.
_FORMULA = re.compile(
    r"(?>\d+(?:\.\d*)?|[-+*/^()\s]|(?<!\w)(?:[A-Za-z]|a?(?:sin|cos|tan)h?|exp|log|sqrt|pi)(?!\w))*+",
    re.ASCII,
)
_ALPHABETS: Mapping[str, re.Pattern[str]] = {
    "complex_arithmetic": re.compile(r"[\d.eEiIjJ+()\s-]*", re.ASCII),
    "countdown": re.compile(r"(?!.*(?:\*\*|//))[\d+*/().\s-]*", re.ASCII | re.DOTALL),
    "intermediate_integration": _FORMULA,
    "number_sorting": re.compile(r"[\d.eE+,'\"\[\]\s-]*", re.ASCII),
    "polynomial_multiplication": _FORMULA,
    "simple_integration": _FORMULA,
}
"""What answers may consist of where the verifier would evaluate more, or would take NaN for equal
to every number. `Integral(...)` restates a task and is no answer."""

_EVALUATED_METADATA: Mapping[str, tuple[str, re.Pattern[str]]] = {
    "bitwise_arithmetic": ("problem", re.compile(r"[0-9a-fx+*<>()\s-]*", re.ASCII)),
    "intermediate_integration": ("integrand", _FORMULA),
    "simple_integration": ("integrand", _FORMULA),
}
"""The same for what verifiers evaluate of the row: a data set's file is trusted with no code."""

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*", re.ASCII)
_WORD = re.compile(r"[^\s,]+")
_READS_THE_FIRST: Mapping[str, re.Pattern[str]] = {
    "advanced_geometry": _NUMBER,
    "fraction_simplification": _NUMBER,
    "gsm_symbolic": _NUMBER,
    "letter_jumble": _WORD,
    "time_intervals": _NUMBER,
    "word_sorting": _WORD,
}
"""Whose verifiers pass over what follows the right answer: no more values than the oracle has."""

_ANYTHING = re.compile(r".*", re.DOTALL)
_OR = re.compile(r"\bor\b", re.IGNORECASE)
_JUNK = ("qqq", "{}")
"""No task's answer; a verifier that accepts one says nothing about the task."""


class Config(AnswerConfig):
    """How the answer is found; the row's extra names the data set and holds the task's metadata."""


@dataclass(frozen=True)
class _Task:
    """One row: the name of its data set, a known good answer, and how to ask its verifier."""

    name: str
    oracle: str
    answer: str | None
    metadata: Mapping[str, Any]
    params: str


GOLD: Sequence[GoldExample] = (
    GoldExample(
        RewardInput(
            "<answer>-4</answer>", answer="-4", extra={"dataset": "chain_sum", "metadata": {}}
        )
    ),
    GoldExample(
        RewardInput(
            "\\boxed{10, 2}",
            answer="10, 2",
            extra={"dataset": "word_sorting", "metadata": {"sorted_words": ["10", "2"]}},
        )
    ),
    GoldExample(
        RewardInput(
            '<answer>{"0": 2, "1": 1}</answer>',
            extra={
                "dataset": "graph_color",
                "metadata": {
                    "puzzle": {"vertices": [0, 1], "edges": [[0, 1]], "color_options": [1, 2]},
                    "possible_answer": {"0": 1, "1": 2},
                },
            },
        )
    ),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns 1 if the data set's own verifier gives the final answer exactly 1.0, else 0.

    Reasons: `no_final_answer`, `hedged` (alternatives, or more values than the task asks for),
    `unreadable` (the verifier raises, or would have to evaluate it as code), `wrong`.
    """
    problem = check_gold(item.answer, item.extra, config)
    task = _task(item.answer, item.extra)
    if problem is not None or isinstance(task, str):
        return Score(None, "grader_error", problem)
    text = answer_text(item, config)
    return text if isinstance(text, Score) else _grade(text, task)


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns why the row cannot be graded, or None.

    It names its data set, which is not refused; the verifier gives the known good answer 1.0, from
    the row as JSON holds it, and junk less.
    """
    task = _task(answer, extra)
    if isinstance(task, str):
        return task
    graded = _grade(task.oracle.strip(), task)
    if graded.value != 1.0:
        return (
            f"reasoning-gym's verifier of {task.name!r} does not accept the task's own answer "
            f"{task.oracle[:60]!r} ({graded.reason})"
        )
    accepted = [junk for junk in _JUNK if junk != task.oracle and _grade(junk, task).value == 1.0]
    if accepted:
        return f"reasoning-gym's verifier of {task.name!r} accepts {accepted[0]!r} for this task"
    return None


def _task(answer: str | None, extra: Mapping[str, Any]) -> _Task | str:
    """Returns the row as a task, or what is wrong with it."""
    name, metadata = extra.get("dataset"), extra.get("metadata")
    params = extra.get("params", {})
    if not (
        isinstance(name, str) and isinstance(metadata, Mapping) and isinstance(params, Mapping)
    ):
        return (
            "the row's extra holds no reasoning-gym task: expected dataset (a name) and metadata "
            "(an object), as the data set kind reasoning_gym stores them"
        )
    if name not in DATASETS:
        return f"reasoning-gym has no data set {name!r}"
    if name in REFUSED:
        return f"reasoning-gym's data set {name!r} cannot be a reward: {REFUSED[name]}"
    oracle = metadata.get(_EXAMPLES[name]) if name in _EXAMPLES else answer
    if oracle is None:
        return f"the task of {name!r} has no answer on which its verifier could be tried"
    oracle = oracle if isinstance(oracle, str) else json.dumps(oracle)
    if not _ALPHABETS.get(name, _ANYTHING).fullmatch(oracle):
        return f"the answer {oracle[:60]!r} of {name!r} is none that can be read without risk"
    key, safe = _EVALUATED_METADATA.get(name, ("", _ANYTHING))
    if not safe.fullmatch(str(metadata.get(key))):
        return f"the {key} of {name!r} is none that can be read without risk"
    return _Task(name, oracle, answer, metadata, json.dumps(params, sort_keys=True))


def _grade(text: str, task: _Task) -> Score:
    if _is_hedged(text, task):
        return Score(0.0, reason="hedged")
    if not _ALPHABETS.get(task.name, _ANYTHING).fullmatch(text):
        return Score(0.0, reason="unreadable")
    if task.name in _ACCEPTED:
        accepted = [known.strip() for known in _ACCEPTED[task.name](task.oracle, task.metadata)]
        return Score(1.0) if text in accepted else Score(0.0, reason="wrong")
    try:
        verdict = _verdict(text, task)
    except MemoryError:
        raise
    except Exception:  # Whatever a verifier does on a text that it does not expect.
        return Score(0.0, reason="unreadable")
    return Score(1.0) if verdict == 1.0 else Score(0.0, reason="wrong")


def _is_hedged(text: str, task: _Task) -> bool:
    if _OR.search(text) and not _OR.search(task.oracle):
        return True
    value = _READS_THE_FIRST.get(task.name)
    return value is not None and len(value.findall(text)) > len(value.findall(task.oracle))


def _verdict(text: str, task: _Task) -> float:
    metadata = copy.deepcopy(dict(task.metadata))  # Some verifiers write into it.
    if task.name in ("arc_agi", "rearc"):  # They compare with tuples, which JSON has not.
        metadata["output"] = tuple(tuple(row) for row in metadata["output"])
    entry = {"question": "", "answer": task.answer, "metadata": metadata}
    return _verifier(task.name, task.params).score_answer(text, entry)


@lru_cache(maxsize=64)
def _verifier(name: str, params: str) -> ProceduralDataset:
    settings = {**json.loads(params), "size": 1, "seed": 0}
    return create_dataset(name, **settings)
