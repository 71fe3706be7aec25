"""What paused schedules mean for a run."""

from uuid import uuid4

import pytest
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule

from flows.schedules import all_paused


def schedule(*, active: bool, **parameters: str) -> DeploymentSchedule:
    cron = CronSchedule(cron="0 2 * * *")
    return DeploymentSchedule(
        deployment_id=uuid4(), schedule=cron, active=active, parameters=parameters
    )


@pytest.mark.parametrize(
    ("schedules", "num_paused"),
    [
        ([], 0),
        ([schedule(active=False, run="other")], 0),
        ([schedule(active=False, run="mine")], 1),
        ([schedule(active=False, run="mine"), schedule(active=False, run="mine")], 2),
        ([schedule(active=False, run="mine"), schedule(active=True, run="mine")], 0),
        ([schedule(active=False, run="mine"), schedule(active=True, run="other")], 1),
        ([schedule(active=True)], 0),
        ([schedule(active=False)], 1),
    ],
)
def test_a_run_is_paused_when_it_has_schedules_and_none_is_active(
    schedules: list[DeploymentSchedule], num_paused: int
) -> None:
    assert len(all_paused(schedules, run="mine", defaults={"run": "mine"})) == num_paused
