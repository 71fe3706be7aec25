"""The base model on this host: found or made, checked, and measured, before an engine starts."""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flows.config import RunConfig
from flows.progress import Watcher
from infra.home import engines_python, home
from tasks.processes import end_group
from tasks.train.origins import BUILTIN

WEIGHT_FILES = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack)(\.index\.json)?$")


@dataclass(frozen=True)
class ModelFacts:
    """What the engines' environment found in a model directory."""

    architecture: str
    num_parameters: int
    vocabulary: int
    hidden_size: int
    num_layers: int
    max_positions: int | None
    stop_token_ids: list[int]


def base_model(config: RunConfig, *, watcher: Watcher) -> Path:
    """Returns the directory of the base model, making or fetching it if need be.

    Models that we make are cached under the digest of the code that makes them; others, from a
    hub, under their name.

    Raises:
        ValueError: there is no such model; the message is the origin's own.
    """
    path = config.model.path
    if not path.startswith("builtin:") and Path(path).expanduser().is_dir():
        return Path(path).expanduser().resolve()
    directory = home() / "cache" / "models" / _cache_name(path)
    if not directory.exists():
        watcher.begin(f"model {path}: making it (once per machine)")
        _origins(config, path, str(directory), watcher=watcher)
    return directory


def _cache_name(path: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", path)
    maker = BUILTIN.get(path.removeprefix("builtin:"))
    spec = importlib.util.find_spec(maker) if maker and path.startswith("builtin:") else None
    if spec is None or spec.origin is None:
        return safe
    return f"{safe}-{hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:12]}"


def check_model(config: RunConfig, directory: Path, *, watcher: Watcher) -> ModelFacts:
    """Checks that the directory holds a dense text decoder that can be trained and served.

    Raises:
        ValueError: no tokenizer, another vocabulary, weights missing or not finite, or a kind of
            model that is refused by name.
    """
    watcher.begin("model: checking it")
    answer = _origins(config, "--check", str(directory), watcher=watcher)
    facts = json.loads(answer)
    return ModelFacts(**{name: facts[name] for name in ModelFacts.__dataclass_fields__})


def model_files(directory: Path) -> dict[str, Path]:
    """Returns the files that a model needs beside its weights, by name: config and tokenizer."""
    return {
        path.name: path
        for path in sorted(directory.iterdir())
        if path.is_file() and not WEIGHT_FILES.match(path.name) and not path.name.startswith(".")
    }


def weight_digests(directory: Path) -> dict[str, str]:
    """Returns the sha256 of every safetensors file, by name."""
    digests: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _origins(config: RunConfig, *arguments: str, watcher: Watcher) -> str:
    """Runs the model maker in the engines' environment; returns its last line.

    It is a session and group of its own, and ends with this call however this call ends.
    """
    python = config.train.python or engines_python()
    command = [python, "-m", "tasks.train.origins", "--lifeline", *arguments]
    # A file, because a pipe that nobody reads fills up and stops the maker.
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # Never written to: it closes when this process ends.
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            # torch makes this directory when it is imported; by default among temporary files.
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(home() / "cache" / "inductor")},
        )
        try:
            last = _last_line(process, watcher)
        finally:
            end_group(process, grace_s=0.0)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").strip().splitlines()
    if process.returncode:
        raise ValueError(said[-1] if said else f"{' '.join(command)} ended without a word.")
    return last


def _last_line(process: "subprocess.Popen[bytes]", watcher: Watcher) -> str:
    """Passes on what the maker says until it ends."""
    last = ""
    assert process.stdout is not None
    for line in process.stdout:
        last = line.decode("utf-8", "replace").strip()
        if last and not last.startswith("{"):
            watcher.begin(last)
    process.wait()
    return last
