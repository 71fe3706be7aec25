from pathlib import Path

import pytest

from flows.launch import check_storable
from flows.recipes import RECIPES


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_recipe_can_be_stored(recipe: str):
    check_storable(RECIPES[recipe]())


def test_what_json_cannot_give_back_is_refused():
    config = RECIPES["addition"]()
    infinite = config.train.model_copy(update={"learning_rate": float("inf")})
    with pytest.raises(ValueError, match=r"train\.learning_rate"):
        check_storable(config.model_copy(update={"train": infinite}))
    dataset = config.prompts.datasets[0]
    odd = dataset.model_copy(update={"options": {"text": float("nan")}})
    prompts = config.prompts.model_copy(update={"datasets": [odd]})
    with pytest.raises(ValueError, match="cannot be stored"):
        check_storable(config.model_copy(update={"prompts": prompts}))


def test_a_path_among_options_is_stored_as_text():
    config = RECIPES["addition"]()
    dataset = config.prompts.datasets[0].model_copy(
        update={"kind": "jsonl", "options": {"path": Path("rows.jsonl")}}
    )
    prompts = config.prompts.model_copy(update={"datasets": [dataset]})
    check_storable(config.model_copy(update={"prompts": prompts}))
