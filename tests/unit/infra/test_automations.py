"""Automations as Prefect's own schema reads them, and what keeps them from answering themselves."""

from copy import deepcopy
from typing import Any

import pytest
from prefect.server.events.schemas.automations import AutomationCreate

from infra import automations as automations_module
from infra.automations import (
    FLOWS,
    POOLS,
    RESTARTED,
    WAITING_NAME,
    apply,
    automations,
    on_data,
    on_deployment,
)

SERVER = "http://server/api"
DEPLOYMENT = "00000000-0000-0000-0000-000000000001"
EVERY = automations(notify_block_id=DEPLOYMENT)


class Server:
    """Keeps automations as the real one does, without looking into them."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []
        self.asked: list[str] = []

    def call(self, api_url: str, method: str, path: str, body: Any = None) -> Any:
        assert api_url == SERVER
        self.asked.append(method)
        if path == "/automations/filter":
            names = body["automations"]["name"]["any_"]
            return [each for each in self.kept if each["name"] in names]
        if path == "/automations/":
            self.kept.append({"enabled": True, **body, "id": len(self.kept), "created": 0})
            return None
        position = [str(each["id"]) for each in self.kept].index(path.rsplit("/", 1)[-1])
        before = self.kept.pop(position)
        if method == "PUT":
            self.kept.insert(position, {**body, "id": before["id"], "created": 0})
        return None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(automations_module, "call", made.call)
    monkeypatch.setattr(automations_module, "find_deployment", lambda *_: {"id": DEPLOYMENT})
    return made


@pytest.mark.parametrize("automation", EVERY, ids=lambda automation: automation["name"])
def test_prefect_reads_every_automation(automation: dict[str, Any]) -> None:
    # Prefect changes what it is given.
    AutomationCreate.model_validate(deepcopy(automation))


def test_prefect_reads_what_starts_advance(server: Server) -> None:
    AutomationCreate.model_validate(on_data(SERVER, "s3://b/p/", {"run": "r"}))
    AutomationCreate.model_validate(on_deployment(SERVER, "a/b", {"run": "{{ event.id }}"}))


@pytest.mark.parametrize("automation", EVERY, ids=lambda automation: automation["name"])
def test_a_state_that_an_automation_sets_does_not_trigger_it_at_once(
    automation: dict[str, Any],
) -> None:
    trigger, action = automation["trigger"], automation["actions"][0]
    name = action.get("name") or str(action.get("state")).title()
    reacts = trigger["posture"] == "Reactive" and f"prefect.flow-run.{name}" in trigger["expect"]
    assert not reacts
    assert f"prefect.flow-run.{WAITING_NAME}" not in trigger["expect"]


def test_every_pool_has_a_message_for_flow_runs_that_wait_for_it() -> None:
    waiting = [each for each in EVERY if "waits" in each["name"]]
    assert len(waiting) == len(POOLS)
    for pool, each in zip(POOLS, waiting, strict=True):
        assert f"'{pool}'" in each["actions"][0]["message"]


def test_only_flows_that_can_go_on_are_run_again() -> None:
    assert set(RESTARTED) < set(FLOWS)
    again = [
        e
        for e in EVERY
        if e["actions"][0].get("state") == "SCHEDULED" and "name" not in e["actions"][0]
    ]
    assert [e["trigger"]["match_related"]["prefect.resource.name"] for e in again] == [["advance"]]


def test_a_second_apply_changes_nothing(server: Server) -> None:
    assert len(apply(SERVER, EVERY)) == len(EVERY)
    server.asked.clear()
    assert apply(SERVER, EVERY) == []
    assert set(server.asked) == {"POST"}


def test_what_a_person_switched_off_stays_off_when_it_is_updated(server: Server) -> None:
    apply(SERVER, EVERY)
    server.kept[1]["enabled"] = False
    changed = [EVERY[0], {**EVERY[1], "description": "another"}]
    assert apply(SERVER, changed) == [f"updated {EVERY[1]['name']!r}"]
    assert server.kept[1]["enabled"] is False
    assert server.kept[1]["description"] == "another"


def test_duplicates_are_removed(server: Server) -> None:
    apply(SERVER, EVERY)
    server.kept.append({**server.kept[0], "id": 99})
    apply(SERVER, EVERY)
    assert len(server.kept) == len(EVERY)
