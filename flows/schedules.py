"""What the schedules of this flow run's deployment mean for a run, in a sentence."""

import logging
from collections.abc import Mapping, Sequence
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment, flow_run

log = logging.getLogger(__name__)


def paused_words(client: SyncPrefectClient, run: str) -> str:
    """Returns what to do where a schedule of this deployment names `run` and none starts it again.

    Empty where one is active, where none names the run, and outside a deployment. A server that
    does not answer costs the sentence only.
    """
    deployment_id = deployment.get_id()
    if deployment_id is None:
        return ""
    try:
        found = client.read_deployment(UUID(deployment_id))
    except (httpx.HTTPError, ObjectNotFound) as error:
        log.info("the deployment's schedules cannot be read: %s", error)
        return ""
    name = f"{flow_run.get_flow_name()}/{found.name}"
    ours = schedules_of(run, found.schedules, defaults=found.parameters or {})
    if found.paused and ours:
        return f" Deployment {name} is paused: none of its schedules starts the run again."
    paused = [] if any(each.active for each in ours) else ours
    if not paused:
        return ""
    commands = " ".join(
        f"`prefect deployment schedule resume {name} {schedule.id}`" for schedule in paused
    )
    return (
        " Its schedule is paused and does not start it again. Resume it by the switch on the "
        f"deployment's page, or: {commands}"
    )


def schedules_of(
    run: str, schedules: Sequence[DeploymentSchedule], *, defaults: Mapping[str, object]
) -> list[DeploymentSchedule]:
    """Returns the schedules that start `run`, given the deployment's own parameters."""
    return [each for each in schedules if {**defaults, **each.parameters}.get("run") == run]
