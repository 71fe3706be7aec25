"""Starts services of a run through their deployments, where nobody else has."""

import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.exceptions import ObjectNotFound

from flows.config import PlacementConfig
from storage.records import RunRecord
from storage.store_config import StoreConfig

log = logging.getLogger(__name__)

_AGAIN_S = 10.0
_OPEN = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")


def wanted_services(stage: str, placement: PlacementConfig) -> int:
    """Returns how many services of a stage a run keeps alive; 0: others do."""
    return placement.rollout_services if stage == "rollout" else placement.train_services


def starter(
    stage: str,
    record: RunRecord,
    placement: PlacementConfig,
    *,
    store: StoreConfig,
    say: Callable[[str], None],
) -> Callable[[], None]:
    """Returns a function to call while services are missing: it starts as many as Prefect lacks.

    What it makes are ordinary flow runs of the deployment `<stage>-service`; they outlive the
    caller and end by themselves when they are idle. One that is scheduled or starting counts.
    """
    wanted = wanted_services(stage, placement)
    name, tags = f"{stage}-service", [f"run:{record.run}", f"{stage}-service"]
    parameters: dict[str, Any] = {
        "run": record.run,
        "store": store.uri,
        "endpoint": store.endpoint,
        "idle_s": placement.idle_s,
    }
    looked = -_AGAIN_S

    def start() -> None:
        nonlocal looked
        if not wanted or time.monotonic() - looked < _AGAIN_S:
            return
        looked = time.monotonic()
        try:
            said = start_missing()
        except httpx.HTTPError as error:
            # The services that are there go on; a later call asks again.
            log.warning("the Prefect server did not start a %s service: %s", stage, error)
            return
        if said:
            say(said)

    def start_missing() -> str | None:
        with get_client(sync_client=True) as client:
            missing = wanted - _num_open(client, tags)
            if missing <= 0:
                return None
            try:
                deployment = client.read_deployment_by_name(f"{name}/{name}")
            except ObjectNotFound:
                return (
                    f"too few {stage} services are alive, and there is no deployment {name!r} to "
                    "start one: `prefect deploy --all` makes it"
                )
            for _ in range(missing):
                client.create_flow_run_from_deployment(
                    deployment.id, parameters=parameters, tags=tags
                )
        return f"started {missing} of {wanted} {stage} services through the deployment {name!r}"

    return start


def _num_open(client: SyncPrefectClient, tags: list[str]) -> int:
    wanted = {"tags": {"all_": tags}, "state": {"type": {"any_": _OPEN}}}
    return len(client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(wanted)))
