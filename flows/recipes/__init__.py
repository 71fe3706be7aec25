from collections.abc import Callable

from flows.config import RunConfig
from flows.recipes.addition import addition
from flows.recipes.smollm2 import smollm2

RECIPES: dict[str, Callable[[], RunConfig]] = {"addition": addition, "smollm2": smollm2}
