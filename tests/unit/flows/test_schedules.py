"""What paused schedules and deployments mean for a run."""

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule

from flows import schedules as module
from flows.schedules import paused_words


def schedule(*, active: bool, **parameters: str) -> DeploymentSchedule:
    cron = CronSchedule(cron="0 2 * * *")
    return DeploymentSchedule(
        id=uuid4(), deployment_id=uuid4(), schedule=cron, active=active, parameters=parameters
    )


@dataclass
class Deployment:
    """What a Prefect client is told of one."""

    schedules: list[DeploymentSchedule]
    paused: bool = False
    name: str = "nightly"
    parameters: dict[str, Any] = field(default_factory=lambda: {"run": "mine"})

    def read_deployment(self, _: object) -> "Deployment":
        return self


@pytest.fixture(autouse=True)
def inside_a_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.deployment, "get_id", lambda: str(uuid4()), raising=False)
    monkeypatch.setattr(module.flow_run, "get_flow_name", lambda: "advance", raising=False)


def words(*schedules: DeploymentSchedule, paused: bool = False) -> str:
    return paused_words(Deployment([*schedules], paused), "mine")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "schedules",
    [
        [],
        [schedule(active=False, run="other")],
        [schedule(active=False, run="mine"), schedule(active=True, run="mine")],
        [schedule(active=True)],
    ],
)
def test_nothing_is_said_where_no_schedule_or_an_active_one_is_of_the_run(
    schedules: list[DeploymentSchedule],
) -> None:
    assert words(*schedules) == ""


def test_every_paused_schedule_of_the_run_is_named_with_what_resumes_it() -> None:
    paused = [schedule(active=False, run="mine"), schedule(active=False)]
    said = words(*paused, schedule(active=True, run="other"))
    for each in paused:
        assert f"`prefect deployment schedule resume advance/nightly {each.id}`" in said


def test_a_paused_deployment_is_named_whatever_its_schedules_are() -> None:
    for active in (True, False):
        assert "Deployment advance/nightly is paused" in words(schedule(active=active), paused=True)
    assert words(paused=True) == ""


def test_a_server_that_does_not_answer_costs_the_sentence_only() -> None:
    class Away:
        def read_deployment(self, _: object) -> None:
            raise httpx.ConnectError("refused")

    assert paused_words(Away(), "mine") == ""  # type: ignore[arg-type]
