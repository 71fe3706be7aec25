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
    """Returns what to do where schedules would start `run` again but all of them are paused.

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
    paused = all_paused(found.schedules, run=run, defaults=found.parameters or {})
    if not paused:
        return ""
    name = f"{flow_run.get_flow_name()}/{found.name}"
    commands = " ".join(
        f"`prefect deployment schedule resume {name} {schedule.id}`" for schedule in paused
    )
    return (
        " Nothing starts it again by itself: its schedule is paused. Resume it by the switch on "
        f"the deployment's page, or: {commands}"
    )


def all_paused(
    schedules: Sequence[DeploymentSchedule], *, run: str, defaults: Mapping[str, object]
) -> list[DeploymentSchedule]:
    """Returns the schedules of a run if it has some and none is active."""
    ours = [each for each in schedules if {**defaults, **each.parameters}.get("run") == run]
    return [] if any(each.active for each in ours) else ours
