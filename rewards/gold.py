"""What a right completion looks like, so that a grader can be tried before a run."""

import re
from collections.abc import Mapping
from typing import Any

from rewards import scorer
from rewards.answer import AnswerConfig

_TAG, _BOX, _HASHES = "<answer>{}</answer>", "\\boxed{{{}}}", "#### {}"
_FORMS = (_TAG, _BOX, _HASHES, "{}")
"""How right answers are written in this field; tried where a grader does not say what it wants."""

JUNK = ("", "I do not know.", "<answer>qqq</answer>", "\\boxed{qqq}", "#### qqq", "qqq")
"""Completions that are right for no prompt."""


_ASKED_FOR = re.compile(
    r"(?P<box>\\boxed)|(?P<tag><answer>)|(?P<hashes>####)|"
    r"(?P<line>[A-Z][A-Za-z ]{0,30}):\s*"
    r"(?:<[^<>\n]{1,40}>|\[[^\[\]\n]{1,40}\]|\{[^{}\n]{1,40}\}|\.{3})"
)


def asked_for(prompt: str, answer: str) -> str | None:
    r"""Returns `answer` in the form that the prompt asks for, None if it names no known form.

    Known are `\boxed`, `<answer>`, `####` and lines like `Answer: <value>`; the last one counts.

    Args:
        prompt: what the model reads, system turn included.
        answer: the gold answer.
    """
    found = list(_ASKED_FOR.finditer(prompt))
    if not found:
        return None
    last = found[-1]
    if last["line"]:
        return f"{last['line']}: {answer}"
    forms = {"tag": _TAG, "box": _BOX, "hashes": _HASHES}
    return forms[str(last.lastgroup)].format(answer)


def finds_answers(kind: str) -> bool:
    """Whether a scoring function looks for a final answer that is marked in some form."""
    return issubclass(scorer(kind).Config, AnswerConfig)


def gold_completions(
    kind: str, options: Mapping[str, Any], answer: str | None, extra: Mapping[str, Any]
) -> tuple[str, ...]:
    """Returns completions of which one at least should have the maximum; empty: nobody can know.

    A grader says it itself with `gold_completion(answer, extra, config) -> str | None`.

    Args:
        kind: the scoring function.
        options: its settings.
        answer: the data set's gold answer.
        extra: what else the data set says of the row.
    """
    module: Any = scorer(kind)
    config = module.Config(**options)
    if hasattr(module, "gold_completion"):
        made: str | None = module.gold_completion(answer, extra, config)
        return () if made is None else (made,)
    if answer is None:
        return ()
    if isinstance(config, AnswerConfig):
        return (_marked(answer, config),)
    return tuple(form.format(answer) for form in _FORMS)


def _marked(answer: str, config: AnswerConfig) -> str:
    if getattr(config, "whole", False):
        return answer
    if "tag" in config.marks:
        return _TAG.format(answer)
    if "box" in config.marks:
        return _BOX.format(answer)
    return f"{config.line_prefix}: {answer}"
