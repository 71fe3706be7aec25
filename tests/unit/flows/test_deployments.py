"""The forms of deployed flows, and what they do where nothing is to be done; no server."""

import importlib
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema

from flows import deployments
from flows.phases import Wishes
from flows.recipes import RECIPES
from infra.automations import FLOWS, POOLS
from storage import ledger
from storage.backends.memory import MemoryStore
from storage.errors import AlreadyExists, LeaseHeld, NotFound
from storage.leases import hold
from tests.contract import records

REPOSITORY = Path(__file__).parents[3]
DEPLOYED = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]


def flow_of(entry: dict[str, Any]) -> Flow:
    """What an entrypoint of prefect.yaml names."""
    file, _, function = entry["entrypoint"].partition(":")
    return getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), function)


FLOW_OF = {entry["name"]: flow_of(entry) for entry in DEPLOYED}


def asked(run: str, recipe: str | None = None, **options: object) -> deployments._Asked:
    values = {"steps": None, "overlap": "cancel new", "wishes": Wishes(), **options}
    return deployments._Asked(run, recipe, **values)  # type: ignore[arg-type]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


@pytest.mark.parametrize("name", FLOWS)
def test_a_form_is_flat_and_every_field_is_described(name: str) -> None:
    form = parameter_schema(FLOW_OF[name]).model_dump()
    assert "$ref" not in json.dumps(form)
    assert form["required"][0] == "run"
    assert [name for name, it in form["properties"].items() if not it.get("description")] == []


def test_recipes_and_overlap_are_choices() -> None:
    fields = parameter_schema(deployments.advance).model_dump()["properties"]
    assert fields["recipe"]["anyOf"][0]["enum"] == sorted(RECIPES)
    assert fields["overlap"]["enum"] == ["cancel new", "queue"]


def test_prefect_yaml_names_all_flows_and_pools_and_schedules_nothing_by_surprise() -> None:
    assert [each["name"] for each in DEPLOYED] == list(FLOWS)
    assert {each["work_pool"]["name"] for each in DEPLOYED} == set(POOLS)
    schedules = [each for entry in DEPLOYED for each in entry.get("schedules", [])]
    assert schedules
    assert not any(each["active"] for each in schedules)


def test_a_scheduled_flow_run_has_the_parameters_that_its_flow_takes() -> None:
    for entry in DEPLOYED:
        for schedule in entry.get("schedules", []):
            FLOW_OF[entry["name"]].validate_parameters(schedule["parameters"])


def test_a_flow_is_named_like_its_deployment() -> None:
    assert {name: driven.name for name, driven in FLOW_OF.items()} == {n: n for n in FLOWS}


def test_a_run_that_is_not_there_needs_a_recipe(store: MemoryStore) -> None:
    with pytest.raises(NotFound, match="no recipe was named to launch it"):
        deployments._launched(store, asked("nightly"))


def test_a_run_that_is_there_is_not_launched_again(store: MemoryStore) -> None:
    record = records.run_record()
    ledger.create_run(store, record)
    assert deployments._launched(store, asked(record.run, "addition")) == record


def test_who_launches_second_goes_on_with_what_the_first_made(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = records.run_record()

    def too_late(*_: object, **__: object) -> None:
        ledger.create_run(store, record)
        raise AlreadyExists("somebody was quicker")

    monkeypatch.setattr(deployments, "launch", too_late)
    assert deployments._launched(store, asked(record.run, "addition")) == record


def test_a_held_lease_is_given_way_to_at_once(store: MemoryStore) -> None:
    with (
        hold(store, "r", "controller", {"flow_run_id": "another"}),
        pytest.raises(LeaseHeld, match="living controller"),
        deployments._lease(store, asked("r"), flow_run_id="mine"),
    ):
        pass


@pytest.mark.parametrize(("overlap", "holder"), [("queue", "another"), ("cancel new", "mine")])
def test_a_held_lease_is_waited_for_if_asked_or_if_it_is_this_flow_run_s(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, overlap: str, holder: str
) -> None:
    lease = hold(store, "r", "controller", {"flow_run_id": holder})
    monkeypatch.setattr(deployments.time, "sleep", lambda _: lease.release())
    with deployments._lease(store, asked("r", overlap=overlap), flow_run_id="mine") as mine:
        assert mine.state.token != lease.state.token
