"""What is killed or stopped under a run on work pools, and when it trains again: `failures`."""

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from infra.automations import POOLS
from infra.daemons import recall
from storage.leases import LeaseState
from tests.benchmarks.pools_world import POLL_S, World, settings
from tests.e2e.pool_stack import FINAL

STALL_S = 15
TROUBLE = re.compile(r"WARNING|ERROR|CRITICAL|lost a call|waiting|trying again|started again")
"""What a log line says that speaks of a failure."""
RESUME_LIMIT_S = 600.0


@dataclass(frozen=True)
class Victim:
    """What a failure needs to know of its run."""

    world: World
    run: str
    flow_run: str
    service: LeaseState

    @property
    def home(self) -> Path:
        """Where the pools live."""
        return self.world.pools.home


@dataclass
class Signs:
    """What there is to see of a failure, beside what was there before it."""

    victim: Victim
    flow_runs: list[str]
    began: float = field(default_factory=time.monotonic)
    sizes: dict[Path, int] = field(default_factory=dict)
    seen: str | None = None
    seen_s: float | None = None

    def __post_init__(self) -> None:
        self.sizes = {file: file.stat().st_size for file in self.files()}

    def files(self) -> list[Path]:
        """Returns the logs of the run and of the workers."""
        logs = self.victim.home / "logs"
        workers = [logs / "services" / f"{pool}.log" for pool in POOLS]
        return [*(logs / self.victim.run).glob("*.log"), *filter(Path.is_file, workers)]

    def look(self) -> None:
        """Notes the first sign, and when it came."""
        if self.seen is None and (found := self._line() or self._state()):
            self.seen, self.seen_s = found[:160], round(time.monotonic() - self.began, 1)

    def _line(self) -> str | None:
        for file in self.files():
            with file.open(errors="replace") as log:
                log.seek(self.sizes.get(file, 0))
                for line in log:
                    if TROUBLE.search(line):
                        return f"{file.stem[:24]}: {line.strip()}"
        return None

    def _state(self) -> str | None:
        for flow_run in self.flow_runs:
            state = self.victim.world.state(flow_run)
            if state and state["type"] not in ("RUNNING", "COMPLETED"):
                return f"flow run {state['name']}: {state['message']}"
        return None


def kill_driver(victim: Victim) -> None:
    """Ends the driver's process."""
    process = victim.world.pools.process_of(victim.flow_run)
    assert process is not None, "it trains"
    process.kill()


def kill_service(victim: Victim) -> None:
    """Ends the process of the rollout service's flow run."""
    os.kill(victim.service.pid, signal.SIGKILL)


def kill_engine(victim: Victim) -> None:
    """Ends the engine of the rollout service."""
    engine_of(victim.service).kill()


def stop_engine(victim: Victim) -> None:
    """Freezes the engine of the rollout service."""
    engine_of(victim.service).suspend()


def engine_of(service: LeaseState) -> psutil.Process:
    """Returns the process that serves, a child of the flow's."""
    for child in psutil.Process(service.pid).children(recursive=True):
        if "tasks.service" in child.cmdline():
            return child
    raise RuntimeError(f"Process {service.pid} has no engine. Expected the service to be ready.")


def kill_server(name: str) -> Callable[[Victim], None]:
    """Returns what ends one of the local servers."""

    def kill(victim: Victim) -> None:
        daemon = recall(victim.home / "services" / f"{name}.json")
        assert daemon is not None, f"{name} was started"
        os.kill(daemon.pid, signal.SIGKILL)

    return kill


SERVERS = {"prefect-server": "prefect", "s3-server": "seaweedfs", "postgresql": "postgres"}
CASES: dict[str, Callable[[Victim], None]] = {
    "driver": kill_driver,
    "rollout-service": kill_service,
    "rollout-engine": kill_engine,
    "hung-engine": stop_engine,
    **{case: kill_server(name) for case, name in SERVERS.items()},
}


def measure_failures(world: World, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns, for each failure, when it was noticed and when the run trained again."""
    steps = options.failure_steps
    calm = world.advance("calm", steps=steps, overrides=settings())
    world.finished(calm)
    expected = world.newest("calm")
    assert expected is not None, "it is complete"
    rows: list[dict[str, Any]] = []
    for case in options.case or CASES:
        row = fail(world, case, steps=steps, outage_s=options.outage)
        commit = world.newest(str(row["run"]))
        row["same_digest"] = bool(commit and commit.policy_digest == expected.policy_digest)
        rows.append(row)
        # Minutes lie between two of them, and a later one may end the benchmark.
        sys.stderr.write(json.dumps(row) + "\n")
    return rows


def fail(world: World, case: str, *, steps: int, outage_s: float) -> dict[str, Any]:
    """Trains a run on services, disturbs it once after step 1, and sees it to its end."""
    run = f"failure-{case}"
    flow_run = world.advance(
        run, steps=steps, overrides=settings("rollout=service", f"stall_s={STALL_S}")
    )
    world.committed(run, 1, flow_run)
    service = world.service(run, "rollout")
    assert service is not None, "it sampled"
    victim = Victim(world, run, flow_run, service)
    signs = Signs(victim, [flow_run, str(service.holder["flow_run_id"])])
    before = world.newest(run)
    assert before is not None, "step 1"
    CASES[case](victim)
    back_s = bring_back(signs, outage_s) if case in SERVERS else None
    trained_s = trains_again(signs, after=before.step)
    ended = world.pools.ends(flow_run, timeout=RESUME_LIMIT_S)
    world.cancel_services(run)
    last = world.newest(run)
    return {
        "case": case,
        "run": run,
        "noticed_s": signs.seen_s,
        "back_s": back_s,
        "trains_again_s": trained_s,
        "after_back_s": round(trained_s - back_s, 1) if back_s and trained_s else None,
        "ended": ended["name"],
        "steps": last.step if last else None,
        "noticed": signs.seen,
    }


def bring_back(signs: Signs, outage_s: float) -> float:
    """Waits for the outage to pass and starts what is down; returns when it was up again."""
    while time.monotonic() - signs.began < outage_s:
        signs.look()
        time.sleep(POLL_S)
    signs.victim.world.pools.run("infra.services", "up", "--profile", "pools")
    return round(time.monotonic() - signs.began, 1)


def trains_again(signs: Signs, *, after: int) -> float | None:
    """Returns when a step was committed whose work began after the failure; None if never.

    The step in flight may have been past what failed, so it is the one after it that counts.
    """
    victim = signs.victim
    while time.monotonic() - signs.began < RESUME_LIMIT_S:
        signs.look()
        commit = victim.world.newest(victim.run)
        if commit and commit.step >= after + 2:
            return round(time.monotonic() - signs.began, 1)
        state = victim.world.state(victim.flow_run)
        if state and state["type"] in FINAL and commit and commit.step < after + 2:
            return None
        time.sleep(POLL_S)
    return None
