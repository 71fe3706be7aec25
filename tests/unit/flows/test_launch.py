from collections.abc import Sequence
from pathlib import Path

import pytest

from flows.launch import check_storable, free_run_name, put_run, refuse_existing
from flows.recipes import RECIPES
from storage.errors import AlreadyExists
from storage.ledger import list_runs
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig
from tests.contract.faulty_store import FaultyStore
from tests.contract.records import run_record


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


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreConfig(uri=str(tmp_path)), writing=True)


class LaunchedBetween(FaultyStore):
    """Another launch puts its run.json after this one looked which names are free."""

    def folders(self, prefix: str) -> Sequence[str]:
        found = super().folders(prefix)
        if not found:
            put_run(self._store, run_record("addition", "other"), run="addition-1")
        return found


def test_two_launches_at_once_get_two_names(store: ObjectStore):
    ours = put_run(LaunchedBetween(store), run_record("addition"), run=None)
    assert ours.run == "addition-2"
    assert list_runs(store) == ["addition-1", "addition-2"]
    assert free_run_name(store, "addition") == "addition-3"


def test_a_name_that_was_asked_for_is_never_replaced(store: ObjectStore):
    put_run(store, run_record("addition", "other"), run="mine")
    with pytest.raises(AlreadyExists, match="rollbook resume mine"):
        put_run(store, run_record("addition"), run="mine")


def test_a_taken_name_is_found_with_one_look(store: ObjectStore):
    for number in range(3):
        put_run(store, run_record("addition", str(number)), run=None)
    counting = FaultyStore(store)
    with pytest.raises(AlreadyExists, match="addition-2"):
        refuse_existing(counting, "addition-2")
    refuse_existing(counting, "addition-4")
    assert counting.num_calls == 2
