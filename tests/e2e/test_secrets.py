"""A secret key that is planted in a run's credentials comes to light nowhere."""

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.backends.local import LocalStore
from storage.object_store import ObjectStore
from storage.opening import open_store
from tests.e2e.block_pool import run_with_blocks
from tests.e2e.planted import SECRET, CommandLines, holds, in_api, in_files, in_store
from tests.e2e.watched import Browser, Watched

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.s3]


@pytest.fixture
def store(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in watched.keys.environment().items():
        monkeypatch.setenv(name, value)
    return open_store(watched.store, writing=False)


def found_in(places: Iterable[tuple[str, bytes]]) -> list[str]:
    return [name for name, content in places if holds(content)]


def test_no_object_of_the_store_holds_it(store: ObjectStore, watched: Watched):
    objects = in_store(store)
    steps = {key.split("/")[3] for key in objects if key.startswith("runs/watched/steps/")}
    assert len(steps) == watched.steps + 1
    assert sum(key.endswith(".parquet") for key in objects) >= 3 * watched.steps
    assert found_in(objects.items()) == []


def test_a_worker_takes_credentials_from_secret_blocks_and_nothing_shows_them(watched: Watched):
    """First of those that look into Prefect, so that they see what this leaves."""
    ended = run_with_blocks(watched)
    assert ended["state"]["message"] == f"head is step {watched.steps}", ended["state"]
    assert ended["state_type"] == "COMPLETED"
    log = (watched.home / "logs" / "worker-with-block.log").read_bytes()
    assert b"prefect.flow_runs" in log
    assert not holds(log)


def test_nothing_that_prefect_tells_holds_it(watched: Watched):
    answers = in_api(watched.api_url)
    for name in ("flow_runs", "task_runs", "logs", "artifacts", "events", "states"):
        assert watched.run.encode() in answers[name] or len(answers[name]) > 1000, name
    assert found_in(answers.items()) == []


def test_no_file_of_the_home_holds_it(watched: Watched):
    names, holding = [], []
    for name, content in in_files(watched.home, but=["cache"]):
        names.append(name)
        if holds(content):
            holding.append(name)
    assert sum(name.startswith("logs/") for name in names) > 3
    assert holding == []


def test_no_command_line_and_no_printed_line_holds_it(watched: Watched):
    assert any("tasks.service" in line for line in watched.commands)
    assert any("tasks.train.worker" in line for line in watched.commands)
    assert [line for line in watched.commands if SECRET in line] == []
    assert SECRET not in watched.printed


def test_no_page_of_the_ui_holds_it(watched: Watched, browser: Browser):
    run, step = watched.flow_runs("run")[0], watched.flow_runs("step")[-1]
    overview, report = watched.artifacts("overview")[0], watched.artifacts("report")[-1]
    ui, shown = watched.ui_url, {}

    def look(name: str) -> None:
        browser.read_answers()
        shown[name] = browser.shown().encode()

    browser.open(f"{ui}/runs", run["name"])
    look("runs")
    for each in (run, step):
        browser.open(f"{ui}/runs/flow-run/{each['id']}", "Beginning")
        look(f"logs of {each['name']}")
        browser.tab("Parameters", '"run"')
        look(f"parameters of {each['name']}")
    browser.open(f"{ui}/artifacts/artifact/{overview['id']}", "What a step costs")
    look("overview")
    browser.open(f"{ui}/artifacts/artifact/{report['id']}", "Samples")
    look("report")
    browser.open(f"{ui}/blocks", "Blocks")
    look("blocks")
    assert watched.store.uri.encode() in shown[f"parameters of {run['name']}"]
    assert any("logs/filter" in key for key in browser.answers)
    assert found_in(shown.items()) == []
    assert found_in(browser.answers.items()) == []


def test_a_secret_in_a_parameter_is_found(watched: Watched):
    with httpx.Client(base_url=watched.api_url) as client:
        flow = client.post("/flows/", json={"name": "leak"}).json()
        body = {"flow_id": flow["id"], "parameters": {"reason": f"it is {SECRET}"}}
        run = client.post("/flow_runs/", json=body).json()
        try:
            assert "flow_runs" in found_in(in_api(watched.api_url).items())
        finally:
            client.delete(f"/flow_runs/{run['id']}").raise_for_status()
            client.delete(f"/flows/{flow['id']}").raise_for_status()


def test_a_secret_in_an_object_or_a_file_is_found(tmp_path: Path):
    pq.write_table(pa.table({"why": [f"it is {SECRET}"] * 9}), tmp_path / "a.parquet")
    (tmp_path / "run.json").write_text(f'{{"endpoint": "http://key:{SECRET}@host"}}')
    (tmp_path / "innocent.json").write_text("{}")
    store = LocalStore(tmp_path)
    assert found_in(in_store(store).items()) == ["a.parquet", "run.json"]
    assert found_in(in_files(tmp_path, but=[]))[-1:] == ["run.json"]


def test_a_secret_on_a_command_line_is_found():
    commands = CommandLines()
    with commands.watched(), subprocess.Popen([sys.executable, "-c", "input()", SECRET], stdin=-1):
        time.sleep(0.5)
    assert any(SECRET in line for line in commands.seen)
