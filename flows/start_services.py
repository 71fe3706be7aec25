"""Starts services of a run through their deployments, where nobody else has."""

import time
from collections.abc import Callable
from typing import Any

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

from flows.config import PlacementConfig
from storage.records import RunRecord
from storage.store_config import StoreConfig

_AGAIN_S = 60.0
"""A service that was started needs so long to be seen; only then is another one started."""


def starter(
    stage: str,
    record: RunRecord,
    placement: PlacementConfig,
    *,
    store: StoreConfig,
    say: Callable[[str], None],
) -> Callable[[], None]:
    """Returns a function to call while no service is alive: it starts some, at most once a minute.

    What it makes are ordinary flow runs of the deployment `<stage>-service`; they outlive the
    caller and end by themselves when they are idle.
    """
    wanted = placement.rollout_services if stage == "rollout" else placement.train_services
    last = -_AGAIN_S

    def start() -> None:
        nonlocal last
        if not wanted or time.monotonic() - last < _AGAIN_S:
            return
        last = time.monotonic()
        parameters: dict[str, Any] = {
            "run": record.run,
            "store": store.uri,
            "endpoint": store.endpoint,
            "idle_s": placement.idle_s,
        }
        name = f"{stage}-service"
        with get_client(sync_client=True) as client:
            try:
                deployment = client.read_deployment_by_name(f"{name}/{name}")
            except ObjectNotFound:
                say(
                    f"no {stage} service is alive, and there is no deployment {name!r} to start "
                    "one: `prefect deploy --all` makes it"
                )
                return
            for _ in range(wanted):
                client.create_flow_run_from_deployment(
                    deployment.id, parameters=parameters, tags=[f"run:{record.run}", name]
                )
        say(f"no {stage} service is alive: started {wanted} through the deployment {name!r}")

    return start
