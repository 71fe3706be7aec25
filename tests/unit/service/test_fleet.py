"""A fleet gives every request to one living service, and to another one when that fails."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.child_process import Face
from tasks.client import Child, ChildSpec
from tasks.errors import Permanent, Transient
from tasks.fleet import Address, Fleet, FleetSpec
from tasks.service_contract import Health
from tasks.workspace import Workspace
from tests.unit.service.echo_stage import EchoRequest, EchoResult

TOKEN = "a-token-that-services-share"
RUN = "some-run"


@pytest.fixture
def services(
    echo_spec: Callable[..., ChildSpec], workspace: Workspace, tmp_path: Path
) -> Iterator[list[Child]]:
    with ExitStack() as stack:
        children: list[Child] = []
        for name in ("one", "two"):
            spec = echo_spec(pid_file=str(tmp_path / f"pids-{name}"))
            spec = replace(spec, name=f"echo-{name}", face=Face(run=RUN, token=TOKEN))
            children.append(stack.enter_context(Child(spec, workspace=workspace)))
        for child in children:
            child.start()
        for child in children:
            child.wait_ready()
        yield children


def nothing(_: Health) -> None:
    """Any environment will do."""


@pytest.fixture
def fleet_of() -> Iterator[Callable[..., Fleet]]:
    with ExitStack() as stack:

        def make(children: list[Child], **more: object) -> Fleet:
            def find() -> list[Address]:
                return [Address(child.url, child.url) for child in children if child.url]

            spec = FleetSpec("echo", find=find, check=nothing, start_more=lambda: None, wait_s=5.0)
            fleet = Fleet(replace(spec, **more), token=TOKEN)
            stack.callback(fleet.close)
            return fleet

        yield make


def test_calls_at_the_same_time_go_to_different_services(
    services: list[Child], fleet_of: Callable[..., Fleet]
) -> None:
    fleet = fleet_of(services)
    results: list[EchoResult] = []

    def call() -> None:
        results.append(fleet.run(EchoRequest(seconds=1.0), EchoResult))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {result.pid for result in results} == {child.pid for child in services}


def test_the_call_of_a_service_that_dies_goes_to_another(
    services: list[Child], fleet_of: Callable[..., Fleet]
) -> None:
    fleet = fleet_of(services)
    pids: list[int] = []

    def call() -> None:
        pids.append(fleet.run(EchoRequest(seconds=2.0), EchoResult).pid)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.7)
    [busy] = [child for child in services if child.health(within_s=5.0).busy_s is not None]
    [idle] = [child for child in services if child is not busy]
    busy.kill()
    thread.join(30)
    assert pids == [idle.pid]


def test_a_call_without_progress_is_given_up_and_goes_to_another(
    services: list[Child], fleet_of: Callable[..., Fleet]
) -> None:
    fleet = fleet_of(services, stall_s=1.5)
    began = time.monotonic()
    with pytest.raises(Transient, match="No echo service took the request"):
        # Hangs wherever it goes: both are tried, and then nobody is left.
        fleet.run(EchoRequest(do="hang", seconds=60.0), EchoResult)
    assert 3.0 < time.monotonic() - began < 30.0
    assert all(child.health(within_s=5.0).busy_s for child in services)


def test_a_long_call_that_shows_progress_is_waited_for(
    services: list[Child], fleet_of: Callable[..., Fleet]
) -> None:
    assert fleet_of(services, stall_s=1.5).run(EchoRequest(seconds=4.0), EchoResult).pid


def test_nobody_there_says_what_to_start_and_asks_for_more(
    services: list[Child], fleet_of: Callable[..., Fleet]
) -> None:
    asked: list[float] = []
    fleet = fleet_of([], wait_s=1.0, start_more=lambda: asked.append(time.monotonic()))
    with pytest.raises(Transient, match=r"none is alive.*deployment `echo-service`.*=local"):
        fleet.run(EchoRequest(), EchoResult)
    assert asked


def test_another_environment_is_refused_before_the_call(
    services: list[Child], fleet_of: Callable[..., Fleet]
) -> None:
    def refuse(health: Health) -> None:
        raise Permanent(f"runs on {health.environment['python']}")

    with pytest.raises(Permanent, match=r"runs on 3\."):
        fleet_of(services, check=refuse).run(EchoRequest(), EchoResult)
    assert [child.health(within_s=5.0).num_calls for child in services] == [0, 0]


def test_what_is_for_all_goes_to_all(services: list[Child], fleet_of: Callable[..., Fleet]) -> None:
    fleet_of(services, everywhere=(EchoRequest,)).run(EchoRequest(), EchoResult)
    assert [child.health(within_s=5.0).num_calls for child in services] == [1, 1]
