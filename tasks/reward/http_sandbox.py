"""Runs programs in a sandbox service that offers `POST /run_code` (SandboxFusion and its kind)."""

import base64
import logging
import os
import time
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError
from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception_type,
    stop_before_delay,
    wait_exponential,
    wait_random,
)

from rewards.contract import KilledBy, Program, ProgramResult, SandboxLimits
from tasks.reward.contract import SandboxConfig
from tasks.reward.gate import inside
from tasks.reward.supervise import signalled

logger = logging.getLogger(__name__)

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_JITTER_S = 0.2
_BUSY = 429
_MARGIN_S = 30.0
"""Beyond what the program may take: for the service's queue."""
# The service runs `code` as it likes, beside the files: this makes it the program that is meant.
_STARTER = """\
import os, sys
words = {command!r}
words[0] = sys.executable if words[0] == "python" else words[0]
os.environ.update(PYTHONHASHSEED="0")
os.execvp(words[0], words)
"""


class _Away(Exception):
    """The service gave no usable answer; another try may get one."""


class _RunResult(BaseModel):
    """How the service saw the program end."""

    model_config = ConfigDict(frozen=True)

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class _Answer(BaseModel):
    """What `POST /run_code` answers."""

    model_config = ConfigDict(frozen=True)

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    run_result: _RunResult | None = None


class HttpSandbox:
    """A sandbox service; use from any thread.

    The service isolates and limits: it is told seconds and memory, and its time limit, which counts
    wall time, is what it says it is. Output beyond the limit counts as too much here too.
    """

    joins = False

    def __init__(self, config: SandboxConfig) -> None:
        """Opens no connection yet.

        Raises:
            ValueError: the environment variable of the token is not set.
        """
        assert config.url is not None
        self._url = config.url.rstrip("/") + "/run_code"
        self._patience_s = config.patience_s
        self._client = httpx.Client(
            headers=_authorization(config.api_key_env),
            limits=httpx.Limits(max_connections=config.concurrency),
        )

    def close(self) -> None:
        """Closes the connections; safe to call twice."""
        self._client.close()

    def run(self, program: Program, *, limits: SandboxLimits) -> ProgramResult:
        """Returns how `program` ended; see `rewards.contract.Sandbox`.

        Raises:
            OSError: the service is away, busy or broken for longer than `patience_s`, or refuses.
        """
        body = _request(program, limits)
        timeout_s = body["run_timeout"] + _MARGIN_S
        began = time.monotonic()
        retrying = Retrying(
            retry=retry_if_exception_type(_Away),
            stop=stop_before_delay(self._patience_s),
            wait=wait_exponential(_SHORTEST_WAIT_S, _LONGEST_WAIT_S) + wait_random(0, _JITTER_S),
            before_sleep=before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )
        try:
            answer = retrying(self._ask, body, timeout_s)
        except _Away as error:
            waited = time.monotonic() - began
            raise OSError(
                f"The sandbox service at {self._url} gave no answer for {waited:.0f} s: {error}. "
                "Expected a result of POST /run_code; no program was judged. Start the service, or "
                "raise reward.sandbox.patience_s."
            ) from error
        return _result(answer, limits)

    def run_joined(
        self, program: Program, *, checker: Program, limits: SandboxLimits
    ) -> tuple[ProgramResult, ProgramResult]:
        """Refuses: a service runs one program at a time.

        Raises:
            OSError: always.
        """
        raise OSError(
            "A sandbox service cannot join two programs. Expected "
            "reward.sandbox.backend=bubblewrap for tests that need it."
        )

    def _ask(self, body: dict[str, Any], timeout_s: float) -> _RunResult:
        try:
            response = self._client.post(self._url, json=body, timeout=timeout_s)
        except httpx.TransportError as error:
            raise _Away(f"{type(error).__name__}: {error}") from error
        if response.status_code == _BUSY or response.status_code >= 500:
            raise _Away(f"HTTP {response.status_code}: {response.text[:200]}")
        if response.is_error:
            raise OSError(
                f"The sandbox service at {self._url} refused a program with HTTP "
                f"{response.status_code}: {response.text[:200]}. Expected a service that offers "
                "SandboxFusion's POST /run_code; check reward.sandbox.url and api_key_env."
            )
        return _run_result(response)


def _run_result(response: httpx.Response) -> _RunResult:
    try:
        answer = _Answer.model_validate_json(response.content)
    except ValidationError as error:
        raise _Away(f"an answer of another shape: {error}") from error
    result = answer.run_result
    if answer.status == "SandboxError" or result is None or result.status == "Error":
        raise _Away(f"it could not run a program: {answer.message[:200] or answer.status}")
    return result


def _authorization(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    token = os.environ.get(api_key_env)
    if not token:
        raise ValueError(
            f"reward.sandbox.api_key_env names {api_key_env}, which is not set. Expected the "
            "service's bearer token there; export it, or drop the setting."
        )
    return {"Authorization": f"Bearer {token}"}


def _request(program: Program, limits: SandboxLimits) -> dict[str, Any]:
    files = {inside(name): _base64(content) for name, content in program.files.items()}
    return {
        "code": _STARTER.format(command=list(program.command)),
        "language": "python",
        "stdin": program.stdin.encode("utf-8", "replace").decode(),
        "run_timeout": limits.cpu_s + limits.asleep_s,
        "memory_limit_MB": limits.memory_bytes >> 20,
        "files": files,
    }


def _base64(content: str) -> str:
    return base64.b64encode(content.encode("utf-8", "surrogatepass")).decode("ascii")


def _result(result: _RunResult, limits: SandboxLimits) -> ProgramResult:
    stdout, stderr = result.stdout or "", result.stderr or ""
    code = result.return_code
    killed_by: KilledBy | None = None
    if result.status == "TimeLimitExceeded":
        killed_by = "cpu"
    elif max(len(stdout.encode()), len(stderr.encode())) > limits.output_bytes:
        killed_by = "output"
    else:
        killed_by = "signal" if code is None else signalled(code)
    return ProgramResult(
        exit_code=None if killed_by else code,
        stdout=stdout[: limits.output_bytes],
        stderr=stderr[: limits.output_bytes],
        killed_by=killed_by,
    )
