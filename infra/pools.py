"""Work pools of one machine: the pools, a worker for each, deployments and automations.

`make up PROFILE=pools`. Production has its own workers; what `prefect.yaml` deploys is the same.
"""

import hashlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.automations import HEARTBEAT_S, POOLS, apply, automations
from infra.daemons import Command, Daemon, ServiceError, recall, spawn, stop
from infra.home import checkout, home, service_token_file, write_private
from infra.prefect_api import Refused, call
from infra.prefect_server import quiet_prefect

WORKER_HEARTBEAT_S = 10
"""A worker that was silent three times as long is shown as offline."""
_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 60.0
"""A trainer that is stopped stores its state first."""
_DEPLOY_LIMIT_S = 300.0
_FLOW_RUN = b"PREFECT__FLOW_RUN_ID="
_LEADERS = (b"prefect.engine", b"prefect.runner", b"tasks.service")
"""What leads a process group of a flow run: it, who runs it, and its engines."""

Say = Callable[[str], None]


def up_pools(api_url: str, store: Mapping[str, str], say: Say) -> None:
    """Makes pools, workers, deployments and automations be there. Safe and quick to repeat.

    Args:
        api_url: of the Prefect server, which runs.
        store: variables that name the default store and its credentials for workers.
        say: told what a person should know.

    Raises:
        ServiceError: a worker did not come up, or the deployments do not deploy.
    """
    root = checkout()
    if root is None:
        raise ServiceError(
            "Work pools run the flows of a checkout, and this is an installed package. Clone the "
            "repository and run `make up PROFILE=pools` there."
        )
    environment = _worker_environment(api_url, store)
    for pool in POOLS:
        _make_pool(api_url, pool)
    began = datetime.now(UTC)
    started = {pool for pool in POOLS if _start_worker(pool, environment, say=say)}
    _deploy(api_url, root, environment, say=say)
    for line in apply(api_url, automations()):
        say(f"automations: {line}")
    for pool in sorted(started):
        _wait_for_worker(api_url, pool, since=began)


def down_pools() -> list[str]:
    """Ends all workers and the flow runs that they started; returns the names of the workers."""
    workers = [found for pool in POOLS if (found := _alive(pool))]
    with ThreadPoolExecutor(len(POOLS)) as threads:
        list(threads.map(lambda worker: stop(worker, grace_s=_STOP_LIMIT_S), workers))
    # Those of a worker that was killed have nobody to end them.
    _end_flow_runs()
    return [worker.name for worker in workers]


def worker_daemons() -> dict[str, Daemon | None]:
    """Returns the workers by pool; None for one that does not run."""
    return {pool: _alive(pool) for pool in POOLS}


def pools_are_set_up() -> bool:
    """Whether this home was brought up with pools at least once."""
    return any(_state(pool).is_file() for pool in POOLS)


def service_token() -> Path:
    """Returns the file of the token for services on this host (mode 600), made if missing."""
    file = service_token_file()
    if not file.exists():
        write_private(file, secrets.token_urlsafe(32) + "\n")
    return file


def _worker_environment(api_url: str, store: Mapping[str, str]) -> dict[str, str]:
    return {
        **quiet_prefect(home() / "prefect-workers"),
        **store,
        "PREFECT_API_URL": api_url,
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_WORKER_HEARTBEAT_SECONDS": str(WORKER_HEARTBEAT_S),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "ROLLBOOK_HOME": str(home()),
        "ROLLBOOK_SERVICE_TOKEN_FILE": str(service_token()),
    }


def _make_pool(api_url: str, pool: str) -> None:
    body = {
        "name": pool,
        "type": "process",
        "description": f"Rollbook: {pool}",
        "base_job_template": {},
    }
    try:
        call(api_url, "GET", f"/work_pools/{pool}")
    except Refused as error:
        if error.status != 404:
            raise
        # Its first worker puts the template of process pools there.
        call(api_url, "POST", "/work_pools/", body)


def _start_worker(pool: str, environment: dict[str, str], *, say: Say) -> bool:
    """Starts the worker of a pool, unless it runs as it should; returns whether it did."""
    running = _alive(pool)
    if running and _has_environment(running, environment):
        return False
    if running:
        say(f"the worker of {pool} starts again: what it has to talk to has moved")
        stop(running, grace_s=_STOP_LIMIT_S)
    argv = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process"]
    argv += ["--pool", pool, "--name", f"local-{pool}"]
    spawn(Command(f"worker {pool}", argv, _log(pool), environment, {})).save(_state(pool))
    return True


def _has_environment(worker: Daemon, wanted: Mapping[str, str]) -> bool:
    lines = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
    return all(f"{name}={value}".encode() in lines for name, value in wanted.items())


def _deploy(api_url: str, root: Path, environment: Mapping[str, str], *, say: Say) -> None:
    """Deploys what `prefect.yaml` names, unless this server has just that."""
    done, mark = home() / "services" / "deployed", _deployed(api_url, root)
    if done.is_file() and done.read_text() == mark and _num_deployments(api_url):
        return
    argv = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    log = _log("deploy")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        code = subprocess.run(
            argv,
            cwd=root,
            env={**os.environ, **environment, "COLUMNS": "200"},
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            timeout=_DEPLOY_LIMIT_S,
            check=False,
        ).returncode
    if code != 0:
        tail = "\n".join(f"  | {line}" for line in log.read_text().splitlines()[-12:])
        raise ServiceError(f"`prefect deploy --all` failed. The end of {log}:\n{tail}")
    done.write_text(mark)
    say("deployments: deployed what prefect.yaml names")


def _deployed(api_url: str, root: Path) -> str:
    """Returns a digest of what deployments are made of: prefect.yaml, the flows, where."""
    files = [root / "prefect.yaml", *sorted((root / "flows").rglob("*.py"))]
    digest = hashlib.sha256(f"{api_url} {root}".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _num_deployments(api_url: str) -> int:
    return int(call(api_url, "POST", "/deployments/count", {}))


def _wait_for_worker(api_url: str, pool: str, *, since: datetime) -> None:
    """Waits until the worker of a pool has been heard of after `since`.

    Raises:
        ServiceError: it ended, or takes too long; with the end of its log.
    """
    deadline = time.monotonic() + _START_LIMIT_S
    while not _is_online(api_url, pool, since=since):
        if _alive(pool) is None or time.monotonic() > deadline:
            tail = "\n".join(_log(pool).read_text(errors="replace").splitlines()[-8:])
            raise ServiceError(f"The worker of pool {pool} did not come up.\n{tail}")
        time.sleep(0.1)


def _is_online(api_url: str, pool: str, *, since: datetime) -> bool:
    workers: list[dict[str, Any]] = call(api_url, "POST", f"/work_pools/{pool}/workers/filter", {})
    return any(
        worker["name"] == f"local-{pool}"
        and datetime.fromisoformat(worker["last_heartbeat_time"]) > since
        for worker in workers
    )


def _end_flow_runs() -> None:
    """Ends what workers of this home started and left: first asked, then killed with its group."""
    left = list(_flow_run_pids())
    for pid in left:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
            os.killpg(pid, signal.SIGCONT)  # A stopped one hears nothing else.
    deadline = time.monotonic() + _STOP_LIMIT_S
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = list(_flow_run_pids())
    for pid in left:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _flow_run_pids() -> Iterator[int]:
    """Yields the leaders of process groups that run a flow run of this home."""
    ours = f"ROLLBOOK_HOME={home()}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes()
        except OSError:  # It has just ended, or is another user's.
            continue
        starts = any(name in command for name in _LEADERS)
        runs = any(variable.startswith(_FLOW_RUN) for variable in variables)
        pid = int(process.name)
        if starts and runs and ours in variables and _leads_its_group(pid):
            yield pid


def _leads_its_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


def _alive(pool: str) -> Daemon | None:
    daemon = recall(_state(pool))
    return daemon if daemon and daemon.is_alive() else None


def _state(pool: str) -> Path:
    return home() / "services" / f"worker-{pool}.json"


def _log(name: str) -> Path:
    return home() / "logs" / "services" / f"{name}.log"
