"""Servers of models: how they are started, fail and end; vLLM itself is in the e2e tests."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rewards.contract import EndpointConfig
from storage.policies import policy_digest
from storage.safetensors_files import RawTensor, write_tensors
from tasks.errors import Permanent
from tasks.reward.endpoint import HttpEndpoint, open_endpoint
from tasks.workspace import Workspace

REPOSITORY = Path(__file__).parents[3]
STAND_IN = Path(__file__).with_name("standing_in_for_vllm.py")


@pytest.fixture
def python(tmp_path: Path) -> str:
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    write_tensors(directory, {"w": RawTensor("F32", (1,), b"\0\0\0\0")}, max_file_bytes=100)
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(cache=tmp_path / "cache", scratch=tmp_path / "scratch")
    made.scratch.mkdir()
    return made


@pytest.fixture
def opened(python: str, model: Path, workspace: Workspace) -> Iterator[Callable[..., HttpEndpoint]]:
    made: list[HttpEndpoint] = []

    def open_one(*arguments: str) -> HttpEndpoint:
        config = EndpointConfig(path=str(model), arguments=arguments, patience_s=0.0)
        made.append(open_endpoint(config, serves="classify", python=python, workspace=workspace))
        return made[-1]

    yield open_one
    for each in made:
        each.close()


def pids_in(file: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return json.loads(file.read_text())


def are_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_model_is_served_described_and_ended(
    opened: Callable[..., HttpEndpoint], model: Path, tmp_path: Path
) -> None:
    endpoint = opened("--pids", str(tmp_path / "pids"))
    assert endpoint.post("/pooling", {"input": ["a"]}, read=lambda answer: answer["pid"])
    described = endpoint.describe()
    assert described["reward_model:tiny"] == policy_digest(model)
    assert described["reward_model_server:tiny"] == "vllm 0.0"
    pids = pids_in(tmp_path / "pids")
    assert all(map(is_alive, pids))
    endpoint.close()
    endpoint.close()
    assert not any(map(is_alive, pids))


def test_what_a_server_started_may_clean_up_after_it(
    opened: Callable[..., HttpEndpoint], tmp_path: Path
) -> None:
    opened("--last-words", str(tmp_path / "cleaned")).close()
    assert (tmp_path / "cleaned").exists()


def test_the_key_stands_in_no_command_line(
    opened: Callable[..., HttpEndpoint], tmp_path: Path
) -> None:
    opened("--pids", str(tmp_path / "pids"))
    server = psutil.Process(pids_in(tmp_path / "pids")[0])
    key = server.environ()["VLLM_API_KEY"]
    assert len(key) > 30
    assert key not in " ".join(server.cmdline())


def test_another_tokenizer_is_another_description(
    opened: Callable[..., HttpEndpoint], model: Path
) -> None:
    before = opened().describe()
    (model / "tokenizer.json").write_text("{}")
    after = opened().describe()
    differing = {name for name in before if before[name] != after[name]}
    assert differing == {"reward_model_files:tiny"}


def test_a_taken_port_is_tried_elsewhere(
    opened: Callable[..., HttpEndpoint], tmp_path: Path
) -> None:
    endpoint = opened("--taken-once", str(tmp_path / "taken"))
    assert (tmp_path / "taken").exists()
    assert endpoint.death() is None


def test_a_server_that_does_not_start_fails_with_its_log(
    opened: Callable[..., HttpEndpoint],
) -> None:
    with pytest.raises(Permanent, match="ended with exit code 3") as said:
        opened("--break")
    assert "| ValueError: no such architecture" in str(said.value)


def test_an_interpreter_that_is_not_there_is_named(model: Path, workspace: Workspace) -> None:
    config = EndpointConfig(path=str(model))
    with pytest.raises(Permanent, match=r"/no/python is not there.*make install"):
        open_endpoint(config, serves="generate", python="/no/python", workspace=workspace)


def test_a_server_that_dies_later_is_blamed_at_once(
    opened: Callable[..., HttpEndpoint], tmp_path: Path
) -> None:
    endpoint = opened("--pids", str(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids")
    os.kill(pids[0], signal.SIGKILL)
    assert are_gone(pids)
    with pytest.raises(OSError, match=r"tiny was ended by signal 9 \(often: memory ran out\)"):
        endpoint.post("/pooling", {"input": ["a"]}, read=lambda answer: answer)
    assert endpoint.death() is not None


def test_nothing_is_left_when_the_watcher_is_killed(
    opened: Callable[..., HttpEndpoint], tmp_path: Path
) -> None:
    endpoint = opened("--pids", str(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids")
    os.kill(pids[2], signal.SIGKILL)
    assert are_gone(pids[:2])
    assert "ended by signal 9" in (endpoint.death() or "")


PARENT = """
import sys
from pathlib import Path
from rewards.contract import EndpointConfig
from tasks.reward.endpoint import open_endpoint
from tasks.workspace import Workspace

python, model, scratch, pids, *more = sys.argv[1:]
config = EndpointConfig(path=model, arguments=("--pids", pids, *more))
workspace = Workspace(cache=Path(scratch), scratch=Path(scratch))
endpoint = open_endpoint(config, serves="classify", python=python, workspace=workspace)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("number", "more"),
    [
        (signal.SIGKILL, []),
        (signal.SIGKILL, ["--hang"]),
        (signal.SIGTERM, []),
        (signal.SIGINT, []),
    ],
)
def test_nothing_is_left_when_the_parent_ends(
    number: signal.Signals,
    more: list[str],
    python: str,
    model: Path,
    workspace: Workspace,
    tmp_path: Path,
) -> None:
    pid_file = tmp_path / "pids"
    words = [python, str(model), str(workspace.scratch), str(pid_file), *more]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pids = pids_in(pid_file)
    if not more:
        assert parent.stdout.readline() == b"ready\n"
    parent.send_signal(number)
    parent.wait(30)
    parent.stdin.close()
    parent.stdout.close()
    assert are_gone(pids)
