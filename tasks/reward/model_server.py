"""Serves a model directory with vLLM in processes of its own, which end with this one.

Knows no grader and no request; `endpoint.py` talks to what runs here.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from storage.policies import policy_digest
from tasks.child_process import last_lines
from tasks.errors import Permanent
from tasks.processes import kill_group, kill_group_with_leader
from tasks.reward.lifeline import GRACE_S
from tasks.workspace import Workspace

logger = logging.getLogger(__name__)

Serves = Literal["generate", "classify"]

_ADDRESS = "127.0.0.1"
_MAX_PORTS = 5
_START_LIMIT_S = 1800.0
_POLL_S = 0.3
_PROGRESS_EVERY_S = 15.0
_MAX_TEMPORARY_BYTES = 68
"""vLLM's sockets lie among temporary files, and the kernel limits their paths."""
_NOISE = re.compile(r"nanobind: | - (leaked|\.\.\. skipped)")
"""What a compiled library says at every end of vLLM, after the cause if there is one."""
_PORT_TAKEN = re.compile("address already in use", re.IGNORECASE)
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth)(\.index\.json)?")
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    # Idle threads that spin take the cores of the engines beside them.
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # On CPU: the model in the engine's process and not in a third one, which imports all again.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM's sampler still compiles one helper, which needs a compiler and up to 15 s.
    "TORCH_COMPILE_DISABLE": "1",
    "PYTHONUNBUFFERED": "1",
}
_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)),
}
"""Of this machine's user to change, unlike the above."""


class _PortTaken(Exception):
    """Somebody else listens at the port that was free a moment ago."""


@dataclass(frozen=True)
class ModelServer:
    """A running server and what it serves. It ends with `close`, or with this process."""

    url: str
    token: str = field(repr=False)
    model: str
    """What the server calls the model."""
    name: str
    """What people call it: the directory's name."""
    digest: str
    """Of the weights, as policies have one."""
    files_digest: str
    """Of what else the answers depend on: config, tokenizer, chat template."""
    version: str
    """Of vLLM."""
    process: "subprocess.Popen[bytes]" = field(repr=False)
    log: Path

    def death(self) -> str | None:
        """Returns how the server ended and the end of its log, or None while it runs."""
        code = self.process.poll()
        return None if code is None else _death(self.name, code, self.log)

    def close(self) -> None:
        """Ends the server and all that it started. Safe to call twice."""
        _end(self.process)


def serve_model(
    path: Path,
    *,
    serves: Serves,
    python: str | None,
    workspace: Workspace,
    arguments: Sequence[str] = (),
    given_up: threading.Event | None = None,
) -> ModelServer:
    """Starts vLLM on a model directory and returns when it answers: half a minute and more.

    Args:
        path: a Hugging Face model directory.
        serves: `classify` for sequence classification, `generate` for chat.
        python: interpreter of the engines' environment.
        workspace: log and sockets lie in its scratch, compiled code in its cache.
        arguments: further ones of the server; they win over ours.
        given_up: set when nobody waits for the start any more.

    Raises:
        ValueError: no model directory, or no interpreter is given.
        Permanent: the server ended before it was ready; the message ends with its log.
    """
    directory = _model_directory(path)
    if python is None:
        raise ValueError(
            f"The model {directory} is to be served here. Expected the interpreter of the engines' "
            "environment: set reward.python, or serve it yourself and give its url."
        )
    with ThreadPoolExecutor(2, thread_name_prefix="digest") as hasher:
        # Beside the start, because it costs as long as reading the weights.
        digests = (
            hasher.submit(weights_digest, directory),
            hasher.submit(files_digest, directory),
        )
        for _ in range(_MAX_PORTS):
            start = _Start(directory, serves=serves, workspace=workspace, given_up=given_up)
            try:
                version = start.run(python, arguments)
            except _PortTaken:
                logger.info("Port %d was taken meanwhile; trying another.", start.port)
                continue
            return start.server(digests[0].result(), digests[1].result(), version=version)
    raise Permanent(
        f"The model {directory} found no port: {_MAX_PORTS} free ones were taken before vLLM could "
        "listen. Expected one on this machine; try again."
    )


def weights_digest(directory: Path) -> str:
    """Returns the policy digest of the safetensors, or a digest of other weight files.

    Raises:
        ValueError: one tensor is in two files.
        Corrupt: a file is cut off.
    """
    if any(directory.glob("*.safetensors")):
        return policy_digest(directory)
    return _file_digest([path for path in _files(directory) if _WEIGHTS.fullmatch(path.name)])


def files_digest(directory: Path) -> str:
    """Returns the sha256 over names and digests of the files that are no weights."""
    return _file_digest([path for path in _files(directory) if not _WEIGHTS.fullmatch(path.name)])


class _Start:
    """One try at a port; ends what it started unless it becomes a server."""

    def __init__(
        self,
        directory: Path,
        *,
        serves: Serves,
        workspace: Workspace,
        given_up: threading.Event | None,
    ) -> None:
        self._directory = directory
        self._serves = serves
        self._workspace = workspace
        self._given_up = given_up or threading.Event()
        # Random names: whoever lists the model under our token is the server we started.
        self._model = f"{directory.name}-{secrets.token_hex(4)}"
        self._token = secrets.token_urlsafe(32)
        self.port = _free_port()
        self._url = f"http://{_ADDRESS}:{self.port}"
        self._log = workspace.scratch / f"model-{self._model}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, python: str, arguments: Sequence[str]) -> str:
        """Returns vLLM's version when the server is ready."""
        command = [python, *self._command(), *arguments]
        logger.info("Serving the model %s with vLLM: starting it.", self._directory)
        process = self._process = _launch(
            command, environment=self._environment(), log=self._log, python=python
        )
        try:
            return self._wait_ready(process)
        except BaseException:
            _end(process)
            raise

    def server(self, digest: str, files: str, *, version: str) -> ModelServer:
        assert self._process is not None
        return ModelServer(
            url=self._url,
            token=self._token,
            model=self._model,
            name=self._directory.name,
            digest=digest,
            files_digest=files,
            version=version,
            process=self._process,
            log=self._log,
        )

    def _command(self) -> list[str]:
        runner = {"generate": "generate", "classify": "pooling"}[self._serves]
        return [
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self._directory), "--served-model-name", self._model),
            *("--host", _ADDRESS, "--port", str(self.port)),
            *("--runner", runner),
            *("--enforce-eager", "--seed", "0", "--generation-config", "vllm"),
            *("--disable-log-stats", "--uvicorn-log-level", "warning"),
        ]

    def _environment(self) -> dict[str, str]:
        cache, scratch = self._workspace.cache, self._workspace.scratch
        settings = {
            # Not as an argument: everyone on this machine may read those.
            "VLLM_API_KEY": self._token,
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        }
        if len(os.fsencode(scratch)) <= _MAX_TEMPORARY_BYTES:
            settings["TMPDIR"] = str(scratch)
        return {**_DEFAULTS, **os.environ, **_ENVIRONMENT, **settings}

    def _wait_ready(self, process: "subprocess.Popen[bytes]") -> str:
        begun = shown = time.monotonic()
        headers = {"Authorization": f"Bearer {self._token}"}
        with httpx.Client(
            base_url=self._url, headers=headers, timeout=5.0, trust_env=False
        ) as http:
            while not self._is_ready(http):
                if (code := process.poll()) is not None:
                    raise self._failure(code)
                now = time.monotonic()
                if now - begun > _START_LIMIT_S:
                    raise Permanent(self._told(f"is not ready after {_START_LIMIT_S:g} s"))
                if now - shown > _PROGRESS_EVERY_S:
                    shown = now
                    logger.info("Model %s: loading, %.0f s.", self._directory.name, now - begun)
                if self._given_up.wait(_POLL_S):
                    raise Permanent(self._told("was not waited for"))
            took = time.monotonic() - begun
            logger.info("Model %s: ready after %.0f s.", self._directory.name, took)
            return str(http.get("/version").json()["version"])

    def _is_ready(self, http: httpx.Client) -> bool:
        try:
            if not http.get("/health").is_success:
                return False
            listed = http.get("/v1/models")
        except httpx.TransportError:
            return False
        if self._model not in listed.text:
            raise _PortTaken
        return True

    def _failure(self, code: int) -> Exception:
        if _PORT_TAKEN.search("\n".join(last_lines(self._log, noise=_NOISE))):
            return _PortTaken()
        return Permanent(_death(self._directory.name, code, self._log))

    def _told(self, what: str) -> str:
        return f"The server of the model {self._directory.name} {what}.{_tail(self._log)}"


def _model_directory(path: Path) -> Path:
    directory = path.expanduser()
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{path} is no model directory: it has no config.json. Expected one as transformers' "
            "save_pretrained writes it, with the tokenizer beside the weights."
        )
    return directory.resolve()


def _launch(
    command: Sequence[str], *, environment: dict[str, str], log: Path, python: str
) -> "subprocess.Popen[bytes]":
    if not Path(python).exists():
        raise Permanent(
            f"The interpreter {python} is not there. Expected the engines' environment: run "
            "`make install`, or set reward.python."
        )
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tasks.reward.lifeline", *command],
            stdin=subprocess.PIPE,  # Never written to: it closes when this process ends.
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
        )
    kill_group_with_leader(process.pid)
    return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2 * GRACE_S)
    kill_group(process.pid)
    process.wait()


def _free_port() -> int:
    with socket.create_server((_ADDRESS, 0)) as server:
        return server.getsockname()[1]


def _death(name: str, code: int, log: Path) -> str:
    # The watcher passes a signal on as 128 + its number; one that it died of itself is negative.
    number = -code if code < 0 else code - 128
    how = f"was ended by signal {number}" if number > 0 else f"ended with exit code {code}"
    hint = " (often: memory ran out)" if number == signal.SIGKILL else ""
    return f"The server of the model {name} {how}{hint}.{_tail(log)}"


def _tail(log: Path) -> str:
    lines = "\n".join(f"  | {line}" for line in last_lines(log, noise=_NOISE))
    return f"\nThe end of its log, {log}:\n{lines}" if lines else ""


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.iterdir()) if path.is_file()]


def _file_digest(paths: Sequence[Path]) -> str:
    digests: list[tuple[str, str]] = []
    for path in paths:
        with path.open("rb") as file:
            digests.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
