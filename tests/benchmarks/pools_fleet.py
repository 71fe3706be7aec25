"""64 shards over 8 services of the echo stage, two of which are killed: the part `fleet`."""

import heapq
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.inputs import put_input
from storage.opening import open_store
from storage.store_config import StoreConfig
from tasks.child_process import Face
from tasks.client import Child, ChildSpec
from tasks.fleet import Address, Fleet, FleetSpec
from tasks.workspace import open_workspace
from tests.unit.service.echo_stage import EchoRequest, EchoResult

REPOSITORY = Path(__file__).parents[2]
RUN = "bench-fleet"
TOKEN = "a-token-of-this-benchmark"


@dataclass(frozen=True)
class Load:
    """How much there is to do, by how many, and who dies when."""

    shards: int
    services: int
    seconds: float
    dying: int
    kill_after_s: float


def measure_fleet(load: Load, directory: Path) -> list[dict[str, Any]]:
    """Returns what happened with all services alive, and with some of them killed on the way."""
    rows: list[dict[str, Any]] = []
    for dying in (0, load.dying):
        with services(load.services, directory / f"dying-{dying}") as children:
            row = run_shards(children, load, dying=dying)
        ends = [load.kill_after_s] * dying + [float("inf")] * (load.services - dying)
        row["ideal_s"] = round(ideal_s(load.shards, load.seconds, ends), 2)
        rows.append(row)
    return rows


@contextmanager
def services(number: int, directory: Path) -> Iterator[list[Child]]:
    """Yields ready services, each a process of its own with an address."""
    directory.mkdir(parents=True)
    where = StoreConfig(uri=str(directory / "store"))
    config = directory / "config.json"
    config.write_text("{}")
    model = put_input(open_store(where, writing=True), {"config.json": config})
    with open_workspace(directory / "home") as workspace, ExitStack() as stack:
        children: list[Child] = []
        for index in range(number):
            files = {name: str(directory / f"{name}-{index}") for name in ("pid", "closed")}
            spec = ChildSpec(
                name=f"echo-{index}",
                stage="tests.unit.service.echo_stage",
                engine="tests.unit.service.echo_stage",
                config={f"{name}_file": file for name, file in files.items()},
                model=model,
                store=where,
                home=directory / "home",
                log_dir=directory / "home" / "logs",
                environment={"PYTHONPATH": str(REPOSITORY)},
                face=Face(run=RUN, token=TOKEN),
            )
            child = stack.enter_context(Child(spec, workspace=workspace))
            child.start()
            children.append(child)
        for child in children:
            child.wait_ready()
        yield children


def run_shards(children: Sequence[Child], load: Load, *, dying: int) -> dict[str, Any]:
    """Sends every shard at once, as a step does, and kills the first services on the way."""
    found = [Address(f"echo-{i}", str(child.url)) for i, child in enumerate(children)]
    victims = [child.pid for child in children[:dying]]
    said: list[str] = []
    spec = FleetSpec(
        "echo", find=lambda: found, check=lambda _: None, start_more=lambda: None, wait_s=120.0
    )
    fleet = Fleet(spec, token=TOKEN, say=said.append)
    answers: dict[int, list[int]] = {index: [] for index in range(load.shards)}
    failures: list[str] = []

    def send(index: int) -> None:
        try:
            request = EchoRequest(text=RUN, seconds=load.seconds)
            answers[index].append(fleet.run(request, EchoResult).pid)
        except Exception as error:
            failures.append(f"shard {index}: {error}")

    def kill() -> None:
        for pid in victims:
            assert pid is not None, "it was ready"
            os.kill(pid, signal.SIGKILL)

    killer = threading.Timer(load.kill_after_s, kill)
    began = time.monotonic()
    killer.start()
    with ThreadPoolExecutor(load.shards) as threads:
        list(threads.map(send, range(load.shards)))
    took = time.monotonic() - began
    killer.cancel()
    killer.join()
    by_pid = Counter(pid for pids in answers.values() for pid in pids)
    living = [child for child in children if child.pid not in victims]
    called = sum(child.health(within_s=10.0).num_calls for child in living)
    by_living = sum(by_pid[child.pid] for child in living if child.pid is not None)
    fleet.close()
    return {
        "services": len(children),
        "killed": dying,
        "wall_s": round(took, 2),
        "answered_once": sum(len(pids) == 1 for pids in answers.values()),
        "lost": sum(not pids for pids in answers.values()),
        "calls_given_to_another": sum("lost a call" in line for line in said),
        "done_twice_by_living": called - by_living,
        "shards_by_service": sorted(by_pid.values(), reverse=True),
        "failures": failures,
    }


def ideal_s(shards: int, seconds: float, ends: Sequence[float]) -> float:
    """Returns when the last shard could be done, if giving out and noticing took no time.

    Args:
        shards: how many there are.
        seconds: that each takes.
        ends: when each service dies; infinite for one that lives.
    """
    free = [(0.0, end) for end in ends]
    heapq.heapify(free)
    waiting = [0.0] * shards
    last = 0.0
    while waiting:
        since = heapq.heappop(waiting)
        ready, end = heapq.heappop(free)
        begins = max(ready, since)
        if begins + seconds <= end:
            last = max(last, begins + seconds)
            heapq.heappush(free, (begins + seconds, end))
        else:
            heapq.heappush(waiting, max(begins, min(end, begins + seconds)))
    return last
