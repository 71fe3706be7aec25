"""Flows that hold a warm engine on a GPU work pool, for the controllers of one run.

The engine is a child that serves its stage over HTTP; the flow keeps it alive, says in a lease
where it is, and ends it. `python -m flows.services rollout --run RUN` does the same without a work
pool, for a pod of its own.
"""

import argparse
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prefect import flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW, temporary_settings

from flows.changes import config_as_of, newest_plan
from flows.config import RunConfig
from flows.model import base_model
from flows.placement import EngineStage, child_spec, engine_digest, service_role
from flows.prefect_server import controller_settings, run_url
from flows.progress import Lines
from flows.service_report import StatusReport
from flows.service_token import service_token
from flows.stores import resolve_store
from flows.worker_process import begin
from infra.home import home
from storage import environment
from storage.errors import StorageError
from storage.leases import Lease, hold
from storage.ledger import head, read_run
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import RunRecord
from storage.store_config import StoreConfig
from tasks.child_process import Face
from tasks.client import Child
from tasks.errors import Permanent, Transient
from tasks.service_contract import Health
from tasks.workspace import Workspace, open_workspace

log = logging.getLogger("flows.services")
"""By name, because Prefect loads this file under another one, and `flows.*` reaches the UI."""

HOST_VARIABLE = "ROLLBOOK_SERVICE_HOST"
ADVERTISE_VARIABLE = "ROLLBOOK_SERVICE_ADVERTISE"
"""Under which address others reach a service that listens on 0.0.0.0; default: its host's own."""
DRAIN_S = 15.0
"""How long a call in flight may go on when the service is told to end: a spot notice is short."""
_LOOK_EVERY_S = 2.0
_HEALTH_LIMIT_S = 10.0
_MAX_STARTS = 5
"""Engine starts in a row that never became ready; then the service gives up."""


@flow(name="rollout-service", flow_run_name="rollout service of {run}", persist_result=False)
def rollout_service(
    run: str,
    store: str | None = None,
    endpoint: str | None = None,
    host: str | None = None,
    port: int = 0,
    idle_s: float | None = None,
) -> None:
    """Samples for a run until it is told to end, in an engine that stays warm between steps.

    Args:
        run: Name of the run.
        store: s3://bucket/prefix or a directory. Empty: the default store of the worker.
        endpoint: Address of an S3 server that is not AWS.
        host: Where it listens. Empty: ROLLBOOK_SERVICE_HOST of the worker, else loopback.
        port: 0 takes a free one.
        idle_s: End after so many seconds without a call. Empty: never.

    Raises:
        NotFound: there is no such run.
        Permanent: the engine does not start.
    """
    _serve("rollout", run, store, endpoint, wanted_place(host, port, idle_s))


@flow(name="train-service", flow_run_name="train service of {run}", persist_result=False)
def train_service(
    run: str,
    store: str | None = None,
    endpoint: str | None = None,
    host: str | None = None,
    port: int = 0,
    idle_s: float | None = None,
) -> None:
    """Trains a run until it is told to end, with ranks that keep their state between steps.

    Args:
        run: Name of the run.
        store: s3://bucket/prefix or a directory. Empty: the default store of the worker.
        endpoint: Address of an S3 server that is not AWS.
        host: Where it listens. Empty: ROLLBOOK_SERVICE_HOST of the worker, else loopback.
        port: 0 takes a free one.
        idle_s: End after so many seconds without a call. Empty: never.

    Raises:
        NotFound: there is no such run.
        Permanent: the engine does not start.
    """
    _serve("train", run, store, endpoint, wanted_place(host, port, idle_s))


@dataclass(frozen=True)
class Wanted:
    """Where a service listens and how long it stays."""

    host: str
    port: int
    idle_s: float | None
    advertise: str
    """The host that controllers are told."""


def wanted_place(
    host: str | None, port: int, idle_s: float | None, advertise: str | None = None
) -> Wanted:
    """Returns where to listen: as asked, as the worker's environment says, or on loopback."""
    listen = host or os.environ.get(HOST_VARIABLE) or "127.0.0.1"
    told = advertise or os.environ.get(ADVERTISE_VARIABLE)
    if told is None:
        told = socket.gethostbyname(socket.gethostname()) if listen == "0.0.0.0" else listen
    return Wanted(listen, port, idle_s, told)


def _serve(
    stage: EngineStage, run: str, store: str | None, endpoint: str | None, wanted: Wanted
) -> None:
    begin(run)
    with controller_settings(), open_workspace(home()) as workspace:
        where = resolve_store(store, endpoint)
        opened = open_store(where, writing=True)
        record, _ = read_run(opened, run)
        service = _Running(stage, record, opened, where, wanted, workspace, service_token())
        role = service_role(stage, uuid.uuid4().hex[:8])
        config = service.newest_config()
        if stage == "train" and head(opened, run) is None:
            # Genesis imports the base model from this host.
            base_model(config, watcher=Lines(log.info, last=0))
        while True:
            with (
                service.engine(config) as child,
                service.announced(role, child, config) as lease,
                service.report(child) as report,
            ):
                changed = service.watch(child, config, lease, report)
            if changed is None:
                return
            log.info("the run's config changed what the %s engine is started with", stage)
            config = changed


@dataclass
class _Running:
    """One service: what it serves, for whom, and where."""

    stage: EngineStage
    record: RunRecord
    store: ObjectStore
    where: StoreConfig
    wanted: Wanted
    workspace: Workspace
    token: str

    def newest_config(self) -> RunConfig:
        """Returns the config of the run's newest plan."""
        newest = head(self.store, self.record.run)
        plan = newest_plan(self.store, self.record, newest[0] if newest else None)
        return config_as_of(self.record, plan)

    @contextmanager
    def engine(self, config: RunConfig) -> Iterator[Child]:
        """Yields the engine's process, ready; it ends with the block, after a call in flight."""
        face = Face(
            run=self.record.run,
            token=self.token,
            host=self.wanted.host,
            port=self.wanted.port,
            drain_s=DRAIN_S,
        )
        spec = child_spec(self.stage, self.record, config, store=self.where, face=face)
        with Child(spec, workspace=self.workspace, say=log.info) as child:
            self.make_ready(child)
            yield child

    def make_ready(self, child: Child) -> None:
        """Starts the engine, again if it dies while it starts.

        Raises:
            Permanent: it refuses to start.
            Transient: it died each time.
        """
        for left in reversed(range(_MAX_STARTS)):
            try:
                child.wait_ready()
            except Transient as error:
                if not left:
                    raise
                log.warning("the %s engine did not start, trying again: %s", self.stage, error)
                time.sleep(1.0)
            else:
                log.info("the %s engine of run %s is ready", self.stage, self.record.run)
                return

    @contextmanager
    def announced(self, role: str, child: Child, config: RunConfig) -> Iterator[Lease]:
        """Holds the lease by which controllers find the service; it is let go before the end."""
        digest = engine_digest(self.stage, self.record, config)
        with hold(self.store, self.record.run, role, self.holder(child, digest)) as lease:
            yield lease

    def holder(self, child: Child, digest: str, health: Health | None = None) -> dict[str, object]:
        """Returns what the lease says of this service."""
        assert child.url is not None, "the engine listens"
        port = child.url.rpartition(":")[2]
        facts: dict[str, object] = {
            "address": f"http://{self.wanted.advertise}:{port}",
            "engine_digest": digest,
            "flow_run_id": flow_run.get_id(),
            "flow_run_url": run_url(flow_run.get_id()),
        }
        if health is not None:
            facts |= {
                "environment_digest": environment.digest(health.environment),
                "policy_version": health.policy_version,
                "policy_digest": health.policy_digest,
                "num_calls": health.num_calls,
            }
        return facts

    def report(self, child: Child) -> StatusReport:
        """Returns what shows the service's status at its flow run."""
        return StatusReport(
            self.store,
            run=self.record.run,
            stage=self.stage,
            address=str(child.url),
            flow_run_id=flow_run.get_id(),
        )

    def watch(
        self, child: Child, config: RunConfig, lease: Lease, report: StatusReport
    ) -> RunConfig | None:
        """Keeps the engine alive; returns the config to start another with, or None at the end."""
        digest = engine_digest(self.stage, self.record, config)
        stalls = Stalls(limit_s=config.placement.stall_s)
        idle_since, calls = time.monotonic(), -1
        while not lease.lost:
            time.sleep(_LOOK_EVERY_S)
            health = self._looked_after(child, stalls)
            lease.describe(self.holder(child, digest, health))
            if health is not None:
                report.show(health)
            if health is None or health.num_calls != calls or health.busy_s is not None:
                idle_since, calls = time.monotonic(), health.num_calls if health else calls
            elif self.wanted.idle_s and time.monotonic() - idle_since > self.wanted.idle_s:
                log.info("ending: no call for %.0f s", self.wanted.idle_s)
                return None
            newest = self._newest_config_or(config)
            if engine_digest(self.stage, self.record, newest) != digest:
                return newest
        raise Transient("Another process holds this service's lease: this one was taken for dead.")

    def _newest_config_or(self, config: RunConfig) -> RunConfig:
        try:
            return self.newest_config()
        except StorageError as error:
            log.warning("the run's config cannot be read now: %s", error)
            return config

    def _looked_after(self, child: Child, stalls: "Stalls") -> Health | None:
        """Returns the engine's health; starts it again if it is dead or hangs."""
        try:
            health = child.health(within_s=_HEALTH_LIMIT_S)
        except (Transient, Permanent) as error:
            health = None
            if not child.is_alive():
                log.warning("the %s engine died; starting it again: %s", self.stage, error)
                self.make_ready(child)
                stalls.forget()
                return None
        if stalls.is_stalled(health):
            log.warning(
                "the %s engine showed no progress for %.0f s; it is ended and started again",
                self.stage,
                stalls.limit_s,
            )
            child.kill()
            self.make_ready(child)
            stalls.forget()
        return health


class Stalls:
    """Tells an engine that hangs from one that works or waits for work."""

    def __init__(self, *, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Begins anew, after another engine was started."""
        self._progress: int | None = None
        self._since = self._clock()

    def is_stalled(self, health: Health | None) -> bool:
        """Whether nothing moved for the limit; `health` is None where the engine said nothing."""
        now = self._clock()
        if health is not None and (health.busy_s is None or health.progress != self._progress):
            self._progress, self._since = health.progress, now
        return now - self._since > self.limit_s


def main() -> None:
    """Serves a stage of one run until SIGTERM, without a Prefect server."""
    parser = argparse.ArgumentParser(prog="flows.services", description=__doc__)
    parser.add_argument("stage", choices=["rollout", "train"])
    parser.add_argument("--run", required=True)
    parser.add_argument("--store")
    parser.add_argument("--endpoint")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--advertise", help="the host that controllers are told")
    parser.add_argument("--idle-s", type=float)
    asked = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    signal.signal(signal.SIGTERM, _end)
    wanted = wanted_place(asked.host, asked.port, asked.idle_s, asked.advertise)
    # There is no flow run to send log lines to, and Prefect would warn of each.
    with temporary_settings({PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}):
        _serve(asked.stage, asked.run, asked.store, asked.endpoint, wanted)


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
