"""A home with work pools, as `make up PROFILE=pools` makes it, and what tests ask of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from infra.home import home as product_home
from infra.prefect_api import call, find_deployment

REPOSITORY = Path(__file__).parents[2]
SMALL = [
    "evaluate.suites.held_out.max_prompts=64",
    "prompts.groups_per_step=16",
    "rollout.groups_per_shard=8",
]
FINAL = ("COMPLETED", "FAILED", "CANCELLED")


@dataclass(frozen=True)
class Pools:
    """A home with pools, and its Prefect server."""

    home: Path
    api: str
    environment: dict[str, str]

    def run(self, module: str, *options: str) -> str:
        return self.python("-m", module, *options)

    def python(self, *argv: str) -> str:
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=REPOSITORY,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, deployment: str, **parameters: Any) -> str:
        found = find_deployment(self.api, deployment)
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        path = f"/deployments/{found['id']}/create_flow_run"
        return call(self.api, "POST", path, body)["id"]

    def cancel(self, flow_run: str) -> None:
        """What the button in the UI does."""
        state = {"type": "CANCELLING", "name": "Cancelling"}
        call(self.api, "POST", f"/flow_runs/{flow_run}/set_state", {"state": state})

    def state(self, flow_run: str) -> dict[str, Any]:
        return call(self.api, "GET", f"/flow_runs/{flow_run}")["state"]

    def states(self, flow_run: str) -> list[dict[str, Any]]:
        return call(self.api, "GET", f"/flow_run_states/?flow_run_id={flow_run}")

    def flow_runs(self, flow: str) -> list[dict[str, Any]]:
        body = {"flows": {"name": {"any_": [flow]}}}
        return call(self.api, "POST", "/flow_runs/filter", body)

    def wait(self, flow_run: str, seen: Callable[[dict[str, Any]], bool], timeout: float) -> dict:
        deadline = time.monotonic() + timeout
        while not seen(state := self.state(flow_run)):
            assert time.monotonic() < deadline, f"waited {timeout} s in vain: {state}"
            time.sleep(0.2)
        return state

    def ends(self, flow_run: str, timeout: float = 180) -> dict[str, Any]:
        return self.wait(flow_run, lambda state: state["type"] in FINAL, timeout)

    def show(self, run: str) -> dict[str, Any]:
        code = "from flows.cli import main; main()"
        return json.loads(self.python("-c", code, "show", run, "--json"))

    def process_of(self, flow_run: str) -> psutil.Process | None:
        for process in psutil.process_iter(["cmdline", "environ"]):
            variables = process.info["environ"] or {}
            command = " ".join(process.info["cmdline"] or [])
            if variables.get("PREFECT__FLOW_RUN_ID") == flow_run and "prefect.engine" in command:
                return process
        return None

    def leases(self, run: str) -> dict[str, dict[str, Any]]:
        """What the leases of a run say that are held, by role."""
        code = (
            "import json; from flows.stores import resolve_store; "
            "from storage.lease_watch import LeaseWatch; "
            "from storage.opening import open_store; "
            f"watch = LeaseWatch(open_store(resolve_store(), writing=False), {run!r}, ''); "
            "print(json.dumps({s.role: s.model_dump(mode='json') for s in watch.living()}))"
        )
        return json.loads(self.python("-c", code))


@contextmanager
def pools_in(home: Path) -> Iterator[Pools]:
    """Brings the profile up in `home`, and down at the end."""
    shared = product_home() / "cache"
    shared.mkdir(parents=True, exist_ok=True)
    (home / "cache").symlink_to(shared)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
    for name in ("ROLLBOOK_STORE", "ROLLBOOK_ENDPOINT", "AWS_ENDPOINT_URL_S3"):
        environment.pop(name, None)
    environment["ROLLBOOK_HOME"] = str(home)
    made = Pools(home, "", environment)
    try:
        made.run("infra.services", "up", "--profile", "pools")
        api = json.loads((home / "services.json").read_text())["prefect_api_url"]
        yield Pools(home, api, environment)
    finally:
        made.run("infra.services", "down")
