from collections.abc import Callable, Sequence

from flows.config import RunConfig
from flows.overrides import near_names, with_overrides
from flows.recipes.addition import addition
from flows.recipes.smollm2 import smollm2

RECIPES: dict[str, Callable[[], RunConfig]] = {"addition": addition, "smollm2": smollm2}


def from_recipe(name: str, assignments: Sequence[str]) -> RunConfig:
    """Returns the config of a recipe with every `key=value` applied.

    Raises:
        ValueError: there is no such recipe or key (near misses are named), or a value does not fit.
    """
    if name not in RECIPES:
        raise ValueError(f"There is no recipe {name!r}. {near_names(name, sorted(RECIPES))}")
    return with_overrides(RECIPES[name](), assignments)
