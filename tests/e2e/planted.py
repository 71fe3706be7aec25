"""A secret planted in a run's S3 credentials, and every place where it must not come to light."""

import base64
import io
import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow.parquet as pq

from storage.object_store import ObjectStore

SECRET = "PlantedSecretOfTheStore7c41f09e"
ACCESS_KEY = "plantedaccesskey"
PAGE = 200
FILTERS = (
    "flows",
    "flow_runs",
    "task_runs",
    "logs",
    "artifacts",
    "artifacts/latest",
    "deployments",
    "variables",
    "work_pools",
    "automations",
    "block_types",
    "block_documents",
    "v2/concurrency_limits",
)
"""What the API lists by `POST /<name>/filter`. Values of secret blocks are asked for obfuscated."""


def forms(secret: str) -> list[bytes]:
    """The secret as it may lie in a file: as it is, and in base64 at each of three offsets."""
    encoded = [base64.b64encode(b"x" * pad + secret.encode())[4:-4] for pad in (0, 1, 2)]
    return [secret.encode(), *encoded]


def holds(content: bytes, secret: str = SECRET) -> bool:
    return any(form in content for form in forms(secret))


@dataclass
class CommandLines:
    """Command lines of every process of this machine, as often as they can be read."""

    seen: set[str] = field(default_factory=set)

    @contextmanager
    def watched(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._look, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _look(self, over: threading.Event) -> None:
        known: dict[tuple[int, float], None] = {}
        while not over.wait(0.1):
            for process in psutil.process_iter(["pid", "create_time", "cmdline"]):
                key = (process.info["pid"], process.info["create_time"])
                command = process.info["cmdline"]
                # A process that was forked and has not called exec yet shows its parent's line.
                if command and (key not in known or time.time() - key[1] < 2):
                    known[key] = None
                    self.seen.add(" ".join(command))


def in_store(store: ObjectStore) -> dict[str, bytes]:
    """Every object of a store by key; what Parquet compresses is laid open."""
    found = {}
    for entry in store.list(""):
        body = store.get(entry.key)
        found[entry.key] = _rows(body) if entry.key.endswith(".parquet") else body
    return found


def _rows(parquet: bytes) -> bytes:
    table = pq.read_table(io.BytesIO(parquet))
    metadata = str(table.schema.metadata).encode()
    texts = [json.dumps(row, default=str) for row in table.to_pylist()]
    return parquet + metadata + "\n".join(texts).encode()


def in_api(api_url: str) -> dict[str, bytes]:
    """Every answer of the Prefect API that lists something, by what was asked for."""
    found: dict[str, bytes] = {}
    with httpx.Client(base_url=api_url, timeout=60) as client:
        for name in FILTERS:
            found[name] = json.dumps(list(_pages(client, f"/{name}/filter"))).encode()
        found["events"] = b"".join(_events(client))
        runs = json.loads(found["flow_runs"])
        found["states"] = b"".join(
            client.get("/flow_run_states/", params={"flow_run_id": run["id"]}).content
            for run in runs
        )
    return found


def _pages(client: httpx.Client, path: str) -> Iterator[Any]:
    offset = 0
    while True:
        answer = client.post(path, json={"offset": offset, "limit": PAGE})
        answer.raise_for_status()
        rows = answer.json()
        yield from rows
        offset += len(rows)
        if len(rows) < PAGE:
            return


def _events(client: httpx.Client) -> Iterator[bytes]:
    answer = client.post("/events/filter", json={"limit": 50})
    while True:
        answer.raise_for_status()
        yield answer.content
        following = answer.json().get("next_page")
        if not following:
            return
        answer = client.get(following)


def in_files(directory: Path, *, but: Iterable[str] = ()) -> Iterator[tuple[str, bytes]]:
    """Every file under a directory, links not followed; `but` names top folders to leave out."""
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if name.split("/")[0] in but or path.is_symlink() or not path.is_file():
            continue
        try:
            yield name, path.read_bytes()
        except FileNotFoundError:  # A server removed it meanwhile.
            continue
