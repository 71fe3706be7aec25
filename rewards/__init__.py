"""The dictionary of scoring functions: one line per file of this folder."""

import importlib
from difflib import get_close_matches
from typing import cast

from rewards.contract import GoldChecker, Needs

SCORERS: dict[str, str] = {
    "choice": "rewards.choice",
    "code": "rewards.code",
    "exact": "rewards.exact",
    "format": "rewards.format",
    "json_schema": "rewards.json_schema",
    "judge": "rewards.judge",
    "length": "rewards.length",
    "math": "rewards.math",
    "numeric": "rewards.numeric",
    "python": "rewards.python",
    "reasoning_gym": "rewards.reasoning_gym",
    "regex": "rewards.regex",
    "repetition": "rewards.repetition",
    "reward_model": "rewards.reward_model",
}
"""Name in a recipe -> module. Modules load when used: math-verify takes half a second."""


def scorer(kind: str) -> GoldChecker:
    """Returns the scoring function named `kind`: of this folder, or a dotted module of your own.

    Raises:
        ValueError: there is none of that name, or the module does not import.
    """
    module = SCORERS.get(kind, kind)
    if "." not in module:
        near = get_close_matches(kind, SCORERS, n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(
            f"There is no reward {kind!r}.{hint} Expected one of {', '.join(sorted(SCORERS))}, or "
            "the dotted path of a module with Config, score, check_gold and GOLD."
        )
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"The module {module!r} of reward {kind!r} does not import: {error}. Install what it "
            "needs in the controller's environment."
        ) from error
    return cast(GoldChecker, loaded)


def is_foreign(kind: str) -> bool:
    """Whether the code that scores lies outside this folder: to look at its settings runs it."""
    return "." in kind or kind == "python"


def needs(kind: str) -> Needs | None:
    """Returns what the scoring function named `kind` is lent; None: nothing but the sample."""
    return getattr(scorer(kind), "NEEDS", None)
