"""What a right completion looks like, so that a grader can be tried before a run."""

from collections.abc import Mapping
from typing import Any

from rewards import scorer
from rewards.answer import AnswerConfig

FORMS = ("<answer>{}</answer>", "\\boxed{{{}}}", "#### {}", "{}")
"""How right answers are written in this field; tried where a grader does not say what it wants."""

JUNK = ("", "I do not know.", "<answer>qqq</answer>", "\\boxed{qqq}", "#### qqq", "qqq")
"""Completions that are right for no prompt."""


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
    return tuple(form.format(answer) for form in FORMS)


def _marked(answer: str, config: AnswerConfig) -> str:
    if getattr(config, "whole", False):
        return answer
    if "tag" in config.marks:
        return f"<answer>{answer}</answer>"
    if "box" in config.marks:
        return f"\\boxed{{{answer}}}"
    return f"{config.line_prefix}: {answer}"
