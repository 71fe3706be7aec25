"""`make up PROFILE=pools`, real: deployments, two controllers, no worker, kill -9, who is told."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from infra.announce import announce
from infra.automations import FLOWS, RESTART_MESSAGE, WAITING_NAME, apply, automations, on_data
from infra.daemons import recall
from infra.prefect_api import call, find_deployment
from tests.e2e.pool_stack import SMALL, Pools

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.s3]
STEPS = 3


@pytest.fixture(scope="module")
def told(pools: Pools) -> Iterator[list[dict[str, Any]]]:
    """What a webhook is sent when advance ends."""
    received: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            received.append(json.loads(self.rfile.read(size)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:  # type: ignore[override]
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kind = call(pools.api, "GET", "/block_types/slug/custom-webhook")
    schemas = call(
        pools.api,
        "POST",
        "/block_schemas/filter",
        {"block_schemas": {"block_type_id": {"any_": [kind["id"]]}}},
    )
    block = {
        "name": "team",
        "block_type_id": kind["id"],
        "block_schema_id": schemas[0]["id"],
        "data": {
            "name": "team",
            "url": f"http://127.0.0.1:{server.server_address[1]}/hook",
            "method": "POST",
            "json_data": {"subject": "{{subject}}", "body": "{{body}}"},
        },
    }
    call(pools.api, "POST", "/block_documents/", block)
    pools.run(
        "infra.automations", "--api-url", pools.api, "apply", "--notify", "custom-webhook/team"
    )
    yield received
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def waiting(pools: Pools) -> str:
    """A flow run for a pool whose worker was killed; it waits while other tests go on."""
    worker = recall(pools.home / "services" / "worker-reward-cpu.json")
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    return pools.start("reward-stage", run="nothing", request_key="nothing")


@pytest.fixture(scope="module")
def calm(pools: Pools, told: list[dict[str, Any]], waiting: str) -> dict[str, Any]:
    """A run that nobody disturbed, and what became of a second flow run of it."""
    settings = [*SMALL, f"steps={STEPS}"]
    first = pools.start("advance", run="calm", recipe="addition", overrides=settings)
    deadline = time.monotonic() + 120
    while not (lease := pools.leases("calm").get("controller")):
        assert time.monotonic() < deadline, pools.state(first)
        time.sleep(0.2)
    second = pools.start("advance", run="calm", recipe="addition", overrides=settings)
    began = time.monotonic()
    gave_way = pools.ends(second)
    ended = pools.ends(first)
    assert ended["type"] == "COMPLETED", ended
    return {
        "show": pools.show("calm"),
        "first": first,
        "lease": lease,
        "second": gave_way,
        "second_s": time.monotonic() - began,
    }


def test_everything_that_prefect_yaml_names_is_deployed_with_a_flat_form(pools: Pools) -> None:
    found = call(pools.api, "POST", "/deployments/filter", {})
    assert {each["name"] for each in found} == set(FLOWS)
    assert not any(schedule["active"] for each in found for schedule in each["schedules"])
    form = find_deployment(pools.api, "advance")["parameter_openapi_schema"]
    assert "$ref" not in json.dumps(form)
    assert form["required"] == ["run"]
    assert all(field.get("description") for field in form["properties"].values())
    assert form["properties"]["overlap"]["enum"] == ["cancel new", "queue"]


def test_a_second_up_is_quick_and_changes_nothing(pools: Pools) -> None:
    before = call(pools.api, "POST", "/automations/filter", {})
    began = time.monotonic()
    pools.run("infra.services", "up", "--profile", "pools")
    assert time.monotonic() - began < 5
    assert call(pools.api, "POST", "/automations/filter", {}) == before


def test_automations_are_updated_in_place(pools: Pools) -> None:
    wanted = automations()
    changed = [{**wanted[0], "description": "another"}, *wanted[1:]]
    before = call(pools.api, "POST", "/automations/count", {})
    assert apply(pools.api, changed) == [f"updated {wanted[0]['name']!r}"]
    assert apply(pools.api, wanted) == [f"updated {wanted[0]['name']!r}"]
    assert call(pools.api, "POST", "/automations/count", {}) == before


def test_advance_launches_and_trains_on_the_pools(calm: dict[str, Any]) -> None:
    assert calm["show"]["state"] == "complete"
    assert [step["step"] for step in calm["show"]["steps"]] == [0, 1, 2, 3]


def test_a_second_flow_run_ends_at_once_and_names_the_holder(calm: dict[str, Any]) -> None:
    lease, second = calm["lease"], calm["second"]
    assert second["type"] == "CANCELLED"
    for fact in (f"process {lease['pid']} on {lease['host']}", "since ", calm["first"]):
        assert fact in second["message"]


def test_who_wants_to_know_is_told_that_advance_ended(
    calm: dict[str, Any], told: list[dict[str, Any]]
) -> None:
    subjects = {each["subject"]: each["body"] for each in told}
    assert "Run 'calm' is at step 3" in subjects["advance calm: Completed"]
    assert "advance calm: Cancelled" in subjects


def test_announced_data_starts_advance(pools: Pools, calm: dict[str, Any]) -> None:
    apply(pools.api, [on_data(pools.api, "s3://data/prompts/", {"run": "calm"})])
    before = {each["id"] for each in pools.flow_runs("advance")}
    time.sleep(2)  # The server takes up new automations.
    announce(pools.api, "s3://data/elsewhere/x")
    announce(pools.api, "s3://data/prompts/today.jsonl")
    deadline = time.monotonic() + 30
    while not (new := [e for e in pools.flow_runs("advance") if e["id"] not in before]):
        assert time.monotonic() < deadline, "nothing was started"
        time.sleep(0.2)
    assert len(new) == 1
    ended = pools.ends(new[0]["id"])
    assert ended["message"] == "Run 'calm' is at step 3: nothing was left to do."


def test_a_run_whose_schedule_is_paused_says_so_at_its_end(
    pools: Pools, calm: dict[str, Any]
) -> None:
    advance = find_deployment(pools.api, "advance")
    path = f"/deployments/{advance['id']}/schedules"
    body = {"schedule": {"cron": "0 2 1 1 *"}, "active": False, "parameters": {"run": "calm"}}
    [made] = call(pools.api, "POST", path, [body])
    try:
        ended = pools.ends(pools.start("advance", run="calm"))
        assert "Its schedule is paused" in ended["message"]
        # What it says to do, done.
        command = ended["message"].split("`")[1].split()
        there = replace(pools, environment=pools.environment | {"PREFECT_API_URL": pools.api})
        there.python("-m", *command)
        schedules = call(pools.api, "GET", path)
        assert [each["active"] for each in schedules if each["id"] == made["id"]] == [True]
        ended = pools.ends(pools.start("advance", run="calm"))
        assert ended["message"] == "Run 'calm' is at step 3: nothing was left to do."
    finally:
        call(pools.api, "DELETE", f"{path}/{made['id']}")


def test_a_flow_run_without_a_worker_says_why_within_a_minute_and_starts_later(
    pools: Pools, waiting: str, calm: dict[str, Any]
) -> None:
    states = sorted(pools.states(waiting), key=lambda state: state["timestamp"])
    assert [state["name"] for state in states] == ["Scheduled", "Late", WAITING_NAME]
    asked, _, told = (datetime.fromisoformat(state["timestamp"]) for state in states)
    assert (told - asked).total_seconds() < 60
    assert "`prefect worker start --pool reward-cpu`" in states[-1]["message"]
    pools.run("infra.services", "up", "--profile", "pools")
    pools.wait(waiting, lambda state: state["type"] not in ("SCHEDULED", "PENDING"), timeout=60)


def test_a_killed_driver_goes_on_by_itself_to_the_same_bits(
    pools: Pools, calm: dict[str, Any]
) -> None:
    flow_run = pools.start("advance", run="killed", recipe="addition", steps=STEPS, overrides=SMALL)
    deadline = time.monotonic() + 120
    while not (pools.home / "logs" / "killed").is_dir() or not _committed(pools, flow_run):
        assert time.monotonic() < deadline, pools.state(flow_run)
        time.sleep(0.2)
    process = pools.process_of(flow_run)
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    ended = pools.ends(flow_run)
    assert ended["type"] == "COMPLETED", ended
    messages = [state["message"] for state in pools.states(flow_run)]
    assert RESTART_MESSAGE in messages
    shown = pools.show("killed")
    assert [step["step"] for step in shown["steps"]] == [0, 1, 2, 3]
    assert shown["policy_digest"] == calm["show"]["policy_digest"]


def _committed(pools: Pools, flow_run: str) -> bool:
    """Whether step 1 was begun: the first step after genesis is a flow run of its own."""
    steps = [each["name"] for each in pools.flow_runs("step")]
    file = pools.home / "logs" / "killed" / f"flow-run-{flow_run}.log"
    return file.is_file() and steps.count("step 2") >= 2
