"""Real rollout engines for tests: the child process, its models and the store they share."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.inputs import put_input
from storage.layout import StepScope
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.policies import write_policy
from storage.records import InputRef, PolicyRef, Probe
from storage.store_config import StoreConfig

HERE = Path(__file__).parent
BESIDE = HERE.parent.parent / ".venv-engines" / "bin" / "python"
PYTHON = os.environ.get("ROLLBOOK_ENGINES_PYTHON") or (
    str(BESIDE) if BESIDE.exists() else sys.executable
)
VERSIONS = {"v1": 1, "v2": 2, "other": 3}
LIMITS = {
    "max_model_len": 96,
    "max_num_seqs": 128,
    "kv_cache_bytes": 16 << 20,
    "threads": 1,
}
"""What every engine of the tests is started with."""


class EngineSaid(Exception):
    """An error that the child answered with; the name of its class comes first."""


@dataclass(frozen=True)
class Stored:
    """One kind of model with its policies, in a store."""

    kind: str
    directory: Path
    store: ObjectStore
    uri: str
    model: InputRef
    policies: dict[str, PolicyRef]

    def probe(self, version: str, dtype: str = "float32") -> dict[str, Any]:
        return json.loads((self.directory / f"probe-{version}-{dtype}.json").read_text())


class Child:
    """Talks to `rollout_child.py`."""

    def __init__(self, process: "subprocess.Popen[str]", stored: Stored) -> None:
        self._process = process
        self.stored = stored
        self.started_s: float = self._answer()
        self.seconds = 0.0

    def __call__(self, call: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": call, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def load(self, version: str, *, claimed: str | None = None, dtype: str = "float32") -> Any:
        """Loads the weights `version` as the policy `claimed` (default: what they are)."""
        stored, named = self.stored, claimed or version
        return self(
            "load",
            policy=stored.policies[named].model_dump(mode="json"),
            directory=str(stored.directory / version),
            probe=stored.probe(named, dtype),
        )

    def died(self) -> int:
        """Waits for the process to end and returns its code."""
        return self._process.wait(30)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineSaid("nothing: its process ended")
        answer = json.loads(line)
        self.seconds = answer.get("seconds", 0.0)
        if "error" in answer:
            raise EngineSaid(f"{answer['error']}: {answer['message']}")
        return answer["value"]


def make_models(directory: Path) -> Path:
    """Writes all kinds of models to `directory`, once; takes ten seconds."""
    if directory.exists():
        return directory
    command = [PYTHON, str(HERE / "rollout_models.py"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return directory


def put_model(directory: Path, kind: str, *, uri: Path) -> Stored:
    """Puts one kind of model and its policies into a store of its own."""
    home = directory / kind
    store = open_store(StoreConfig(uri=str(uri)), writing=True)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if kind.endswith("-tied") else {}
    policies = {
        name: write_policy(
            store,
            home / name,
            scope=StepScope(run="r", step=version),
            attempt="a",
            version=version,
            dtype="float32",
            tied=tied,
            probe=Probe.from_bytes((home / f"probe-{name}-float32.json").read_bytes()),
            cache=None,
        )
        for name, version in VERSIONS.items()
    }
    model = put_input(store, {"config.json": home / "model" / "config.json"})
    return Stored(kind, home, store, str(uri), model, policies)


@contextmanager
def child(stored: Stored, home: Path, **config: Any) -> Iterator[Child]:
    """Yields a child process with a started engine, and ends it."""
    home.mkdir(parents=True, exist_ok=True)
    spec = home / "spec.json"
    limits = LIMITS | {"max_tokens": 8} | config
    model_dir = str(stored.directory / "model")
    spec.write_text(json.dumps({"config": limits, "model_dir": model_dir, "home": str(home)}))
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [PYTHON, str(HERE / "rollout_child.py"), str(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield Child(process, stored)
    finally:
        process.kill()
        process.communicate()
