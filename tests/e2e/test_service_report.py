"""The status of a service on a real Prefect server: one artifact, changed in place, with links."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import Artifact, FlowRun
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.service_report import StatusReport
from storage.backends.local import LocalStore
from storage.leases import hold
from tasks.service_contract import Health
from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@flow(name="service-for-test")
def service() -> None:
    """Stands for a flow that holds an engine."""


@pytest.fixture(scope="module")
def client(cli: Cli) -> Iterator[SyncPrefectClient]:
    url = json.loads((cli.home / "services.json").read_text())["prefect_api_url"]
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def flow_run(client: SyncPrefectClient) -> FlowRun:
    return client.create_flow_run(service, tags=["mine"])


def artifacts(client: SyncPrefectClient, flow_run: FlowRun) -> list[Artifact]:
    of_it = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
    return client.read_artifacts(artifact_filter=of_it)


def told(client: SyncPrefectClient, flow_run: FlowRun) -> str:
    return "".join(str(found.data) for found in artifacts(client, flow_run))


def report(store: LocalStore, flow_run_id: str | None) -> StatusReport:
    return StatusReport(
        store, run="mine", stage="rollout", address="http://host:1", flow_run_id=flow_run_id
    )


def ready(version: int) -> Health:
    return Health(status="ready", message="it samples", policy_version=version, num_calls=version)


def test_many_looks_make_one_artifact_that_ends_with_the_last(
    client: SyncPrefectClient, flow_run: FlowRun, tmp_path: Path
):
    store = LocalStore(tmp_path)
    lease = hold(store, "mine", "controller", {"flow_run_id": "who-advances"})
    with lease, report(store, str(flow_run.id)) as shown:
        for version in range(30):
            shown.show(ready(version))
            time.sleep(0.1)
    (found,) = artifacts(client, flow_run)
    assert found.key == "mine-rollout-service"
    assert "policy version **29**" in str(found.data)
    assert "/runs/flow-run/who-advances)" in str(found.data)
    assert set(client.read_flow_run(flow_run.id).tags) == {"mine", "run:mine", "rollout-service"}


def test_what_is_shown_is_seen_while_the_service_goes_on(
    client: SyncPrefectClient, flow_run: FlowRun, tmp_path: Path
):
    with report(LocalStore(tmp_path), str(flow_run.id)) as shown:
        for version in (1, 2):
            shown.show(ready(version))
            ends = time.monotonic() + 15
            while f"version **{version}**" not in str(
                [a.data for a in artifacts(client, flow_run)]
            ):
                assert time.monotonic() < ends
                time.sleep(0.1)


def test_a_server_that_is_gone_delays_nobody(flow_run: FlowRun, tmp_path: Path):
    gone = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}
    with temporary_settings(gone), report(LocalStore(tmp_path), str(flow_run.id)) as shown:
        began = time.monotonic()
        shown.show(ready(1))
        assert time.monotonic() - began < 0.1


def test_without_a_flow_run_nothing_is_asked_of_prefect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def refuse(**_: object) -> None:
        raise AssertionError("a client would start a server")

    monkeypatch.setattr("flows.posting.get_client", refuse)
    with report(LocalStore(tmp_path), None) as shown:
        shown.show(ready(1))
