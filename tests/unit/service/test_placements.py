"""A stage gives the same answers and the same errors wherever its placement puts it."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.home import engines_python
from storage.opening import open_store
from tasks.client import Child, ChildSpec, InProcess, StageClient
from tasks.errors import Permanent, Transient
from tasks.workspace import Workspace
from tests.unit.service import echo_stage
from tests.unit.service.echo_stage import EchoRequest, EchoResult

PYTHONS = {"controller": sys.executable, "engines": engines_python()}


@pytest.fixture(params=["in process", "child of controller", "child of engines"])
def client(
    request: pytest.FixtureRequest, echo_spec: Callable[..., ChildSpec], workspace: Workspace
) -> Iterator[StageClient]:
    spec = echo_spec()
    if request.param == "in process":
        engine = echo_stage.start(spec.config, model_dir=workspace.cache, workspace=workspace)
        store = open_store(spec.store, writing=False)
        yield InProcess(echo_stage, store=store, engine=engine, workspace=workspace)
        engine.rank.kill()
        engine.rank.wait()
        return
    python = PYTHONS[request.param.removeprefix("child of ")]
    with Child(replace(spec, python=python), workspace=workspace) as child:
        yield child


def test_answers_are_alike(client: StageClient) -> None:
    awkward = 'a "quote", a newline\n, 7\u00d78 and \U0001f9ee'
    assert client.run(EchoRequest(text=awkward), EchoResult).text == awkward


def test_errors_are_alike(client: StageClient) -> None:
    with pytest.raises(Transient) as transient:
        client.run(EchoRequest(do="unavailable"), EchoResult)
    with pytest.raises(Permanent) as permanent:
        client.run(EchoRequest(do="corrupt"), EchoResult)
    assert str(transient.value) == "Unavailable: the store is out of reach"
    assert str(permanent.value) == "Corrupt: runs/a/b does not match its digest"


def test_a_full_disk_is_reported_with_its_place_and_a_cure(
    client: StageClient, workspace: Workspace
) -> None:
    with pytest.raises(Permanent) as full:
        client.run(EchoRequest(do="full disk"), EchoResult)
    message = str(full.value).splitlines()[0]
    assert message.startswith("RuntimeError: I/O error: No space left on device (os error 28). ")
    assert f"Local files lie in {workspace.scratch.parent} (" in message
    assert f" and {workspace.cache} (" in message
    assert message.endswith("then resume.")


def test_a_child_that_only_reads_leaves_its_store_as_it_was(
    echo_spec: Callable[..., ChildSpec], workspace: Workspace
) -> None:
    spec = echo_spec()
    directory = Path(spec.store.uri)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    with Child(replace(spec, writing=False), workspace=workspace) as child:
        assert child.run(EchoRequest(text="read"), EchoResult).text == "read"
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
