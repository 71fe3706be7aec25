"""The local services: `python -m infra.services up [--profile pools] | down | status`.

An S3 server, PostgreSQL and a Prefect server with its UI, on loopback, in the background, with
their data under `home()`; with the profile `pools` also work pools with a worker each. Production
has its own; nothing else here depends on these.
"""

import argparse
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.daemons import Daemon, ServiceError, free_port, recall, start_listening, stop
from infra.home import home
from infra.pools import down_pools, pools_are_set_up, up_pools, worker_daemons
from infra.postgres import database_url, start_postgres, stop_postgres, wait_for_postgres
from infra.prefect_server import api_url, start_prefect, wait_for_prefect
from infra.seaweedfs import (
    BUCKET,
    endpoint,
    remove_sockets,
    s3_keys,
    start_seaweedfs,
    wait_for_seaweedfs,
)

_PREFECT_PORT = 4200
_S3_PORT = 8333
_SAY_EVERY_S = 10.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class LocalServices:
    """Where the local services are, while they run."""

    prefect_api_url: str
    prefect_ui_url: str
    s3_endpoint: str
    s3_bucket: str
    credentials_path: str
    """An AWS credentials file with one profile."""


def local_services() -> LocalServices | None:
    """Returns where the services of `up` are, or None unless all of them run."""
    file = home() / "services.json"
    if not file.is_file() or not all(_is_up(name) for name in _NAMES):
        return None
    return LocalServices(**json.loads(file.read_text()))


def up(say: Say) -> LocalServices:
    """Starts what does not run, in parallel, and waits until all of it answers.

    Safe to call again, from several processes at once, and after anything was killed.

    Args:
        say: told what a person should know.

    Raises:
        ServiceError: one of them did not start; the message has the end of its log.
    """
    running = local_services()
    if running:
        return running
    began = time.monotonic()
    with _only_one(), ThreadPoolExecutor(2) as threads:
        storing = threads.submit(_up_seaweedfs, say)
        flowing = threads.submit(_up_prefect, say)
        _wait(storing.done, flowing.done, say=say)
        s3, prefect = storing.result(), flowing.result()
        services = LocalServices(
            prefect_api_url=api_url(prefect.ports["http"]),
            prefect_ui_url=f"http://127.0.0.1:{prefect.ports['http']}",
            s3_endpoint=endpoint(s3),
            s3_bucket=BUCKET,
            credentials_path=str(_credentials()),
        )
        (home() / "services.json").write_text(json.dumps(asdict(services), indent=2))
    say(f"services are up ({time.monotonic() - began:.0f} s)")
    return services


def up_with_pools(say: Say) -> LocalServices:
    """As `up`, and work pools with workers, deployments and automations.

    Raises:
        ServiceError: something did not start, or the deployments do not deploy.
    """
    services = up(say)
    began = time.monotonic()
    with _only_one():
        up_pools(services.prefect_api_url, _store_of_workers(services), say)
    say(f"pools are up ({time.monotonic() - began:.0f} s)")
    return services


def _store_of_workers(services: LocalServices) -> dict[str, str]:
    """Returns which store workers use by default, and the credentials that boto3 is to find.

    Nothing where the caller's environment names a store: workers inherit it.
    """
    if os.environ.get("ROLLBOOK_STORE"):
        return {}
    return {
        "ROLLBOOK_STORE": f"s3://{services.s3_bucket}",
        "ROLLBOOK_ENDPOINT": services.s3_endpoint,
        "AWS_SHARED_CREDENTIALS_FILE": services.credentials_path,
    }


def down() -> list[str]:
    """Stops what runs and returns the names of it; all data stays."""
    with _only_one():
        stopped = down_pools() if pools_are_set_up() else []
        stopped += [
            daemon.name
            for name, end in (("prefect", stop), ("postgres", stop_postgres), ("seaweedfs", stop))
            if (daemon := _alive(name)) is not None and end(daemon) is None
        ]
        seaweedfs = recall(_state("seaweedfs"))
        if seaweedfs:
            remove_sockets(seaweedfs)
        return stopped


def _up_seaweedfs(say: Say) -> Daemon:
    running = _alive("seaweedfs")
    if running:
        wait_for_seaweedfs(running)
        return running

    def start() -> Daemon:
        before = recall(_state("seaweedfs"))
        if before:
            remove_sockets(before)
        wanted = (before.ports if before else {}) | {"s3": _S3_PORT}
        daemon = start_seaweedfs(
            home() / "seaweedfs", keys=s3_keys(_credentials()), log=_log("seaweedfs"), ports=wanted
        )
        daemon.save(_state("seaweedfs"))
        if daemon.ports["s3"] != _S3_PORT:
            say(f"port {_S3_PORT} is taken; S3 listens on {daemon.ports['s3']}")
        return daemon

    return start_listening(start, wait_for_seaweedfs)


def _up_prefect(say: Say) -> Daemon:
    data = home() / "postgres"
    postgres = _alive("postgres")
    if postgres is None:
        postgres = start_postgres(data, log=_log("postgres"))
        postgres.save(_state("postgres"))
    wait_for_postgres(postgres, data)
    prefect = _alive("prefect")
    if prefect:
        wait_for_prefect(prefect)
        return prefect
    before = recall(_state("prefect"))
    wanted = before.ports["http"] if before else _PREFECT_PORT

    def start() -> Daemon:
        port = free_port(wanted)
        if port != wanted:
            say(f"port {wanted} is taken; Prefect listens on {port}")
        prefect = start_prefect(
            home() / "prefect", database=database_url(data), port=port, log=_log("prefect")
        )
        prefect.save(_state("prefect"))
        return prefect

    return start_listening(start, wait_for_prefect)


_NAMES = ("seaweedfs", "postgres", "prefect")


def _wait(*done: Callable[[], bool], say: Say) -> None:
    began = said = time.monotonic()
    while not all(each() for each in done):
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            say(f"waiting for the services to answer ({said - began:.0f} s)")
        time.sleep(0.05)


@contextmanager
def _only_one() -> Iterator[None]:
    state = home() / "services"
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _alive(name: str) -> Daemon | None:
    daemon = recall(_state(name))
    return daemon if daemon and daemon.is_alive() else None


def _is_up(name: str) -> bool:
    return _alive(name) is not None


def _state(name: str) -> Path:
    return home() / "services" / f"{name}.json"


def _log(name: str) -> Path:
    return home() / "logs" / "services" / f"{name}.log"


def _credentials() -> Path:
    return home() / "credentials"


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _print_addresses(services: LocalServices) -> None:
    _print(f"  Prefect UI   {services.prefect_ui_url}")
    _print(f"  S3           {services.s3_endpoint}  bucket {services.s3_bucket}")
    _print(f"  credentials  {services.credentials_path}")


def _print_status() -> int:
    for name in _NAMES:
        daemon = _alive(name)
        _print(f"{name:12} {f'runs, process {daemon.pid}' if daemon else 'is down'}")
    workers = worker_daemons() if pools_are_set_up() else {}
    for pool, worker in workers.items():
        _print(f"{pool:12} {f'has worker {worker.pid}' if worker else 'has no worker'}")
    services = local_services()
    if services:
        _print_addresses(services)
    return 0 if services and all(workers.values()) else 1


def _run(command: str, profile: str) -> int:
    if command == "up":
        _print_addresses(up_with_pools(_print) if profile == "pools" else up(_print))
        return 0
    if command == "down":
        _print(f"stopped: {', '.join(down()) or 'nothing was running'}")
        return 0
    return _print_status()


def main() -> None:
    """Runs one command; a failure ends with its cause and a non-zero exit."""
    parser = argparse.ArgumentParser(prog="infra.services", description=__doc__)
    parser.add_argument("command", choices=["up", "down", "status"])
    parser.add_argument(
        "--profile", choices=["local", "pools"], default="local", help="what `up` starts"
    )
    options = parser.parse_args()
    try:
        sys.exit(_run(options.command, options.profile))
    except ServiceError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
