"""A work pool whose job template takes S3 credentials from Prefect secret blocks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from tests.e2e.flow_with_block import read_head
from tests.e2e.watched import Watched

POOL = "with-secret-block"
BLOCKS = {"AWS_ACCESS_KEY_ID": "planted-access-key", "AWS_SECRET_ACCESS_KEY": "planted-secret-key"}
REPOSITORY = Path(__file__).parents[2]


def run_with_blocks(watched: Watched) -> dict[str, Any]:
    """Lets a worker without credentials of its own run `read_head`; returns how it ended."""
    with httpx.Client(base_url=watched.api_url, timeout=60) as client, ExitStack() as made:
        for variable, value in watched.keys.environment().items():
            made.enter_context(_secret_block(client, BLOCKS[variable], value))
        made.enter_context(_made(client, "/work_pools/", _pool(), by="name"))
        deployment = made.enter_context(_made(client, "/deployments/", _deployment(client)))
        parameters = {"run": watched.run, **watched.store.model_dump(include={"uri", "endpoint"})}
        path = f"/deployments/{deployment}/create_flow_run"
        run = _posted(client, path, {"parameters": parameters})["id"]
        _work_once(watched)
        return client.get(f"/flow_runs/{run}").json()


def _pool() -> dict[str, Any]:
    template = ProcessWorker.get_default_base_job_template()
    references = {
        name: f"{{{{ prefect.blocks.secret.{block} }}}}" for name, block in BLOCKS.items()
    }
    # Prefect refuses references in `job_configuration`; a default of a variable is resolved too.
    template["variables"]["properties"]["env"]["default"] = references
    return {"name": POOL, "type": "process", "base_job_template": template}


def _deployment(client: httpx.Client) -> dict[str, Any]:
    flow = _posted(client, "/flows/", {"name": read_head.name})
    return {
        "name": "with-secret-block",
        "flow_id": flow["id"],
        "entrypoint": "tests/e2e/flow_with_block.py:read_head",
        # With `path` alone, the worker would copy the whole checkout, environments included.
        "pull_steps": [
            {"prefect.deployments.steps.set_working_directory": {"directory": str(REPOSITORY)}}
        ],
        "work_pool_name": POOL,
        "parameter_openapi_schema": parameter_schema(read_head).model_dump(),
    }


def _work_once(watched: Watched) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("AWS", "PREFECT"))
    }
    environment |= {
        "PREFECT_API_URL": watched.api_url,
        "PREFECT_HOME": str(watched.home / "worker"),
        "ROLLBOOK_HOME": str(watched.home),
    }
    command = ["-m", "prefect", "worker", "start", "--pool", POOL, "--run-once"]
    log = watched.home / "logs" / "worker-with-block.log"
    with log.open("wb") as file:
        subprocess.run(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=120,
            check=True,
        )


@contextmanager
def _secret_block(client: httpx.Client, name: str, value: str) -> Iterator[str]:
    kind = client.get("/block_types/slug/secret").json()["id"]
    schemas = {"block_schemas": {"block_type_id": {"any_": [kind]}}}
    schema = _posted(client, "/block_schemas/filter", schemas)[0]["id"]
    body = {
        "name": name,
        "block_type_id": kind,
        "block_schema_id": schema,
        "data": {"value": value},
    }
    with _made(client, "/block_documents/", body) as made:
        yield made


@contextmanager
def _made(
    client: httpx.Client, path: str, body: dict[str, Any], *, by: str = "id"
) -> Iterator[str]:
    made = _posted(client, path, body)[by]
    try:
        yield made
    finally:
        client.delete(f"{path}{made}").raise_for_status()


def _posted(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()
