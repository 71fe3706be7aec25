"""Runs programs in a sandbox service that offers `POST /run_code` (SandboxFusion and its kind)."""

import base64
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rewards.contract import KilledBy, Program, ProgramResult, SandboxLimits
from tasks.reward.asking import Manners, MayPass, PatientService, bearer_token
from tasks.reward.contract import SandboxConfig
from tasks.reward.gate import inside
from tasks.reward.supervise import signalled

_PATH = "/run_code"
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
        self._service = PatientService(
            config.url,
            token=bearer_token(config.api_key_env),
            manners=Manners(config.concurrency, config.patience_s),
        )

    def close(self) -> None:
        """Ends every wait for the service; safe to call twice."""
        self._service.close()

    def run(self, program: Program, *, limits: SandboxLimits) -> ProgramResult:
        """Returns how `program` ended; see `rewards.contract.Sandbox`.

        Raises:
            OSError: the service is away, busy or broken for longer than `patience_s`, or refuses.
        """
        body = _request(program, limits)
        answer = self._service.ask(
            "POST",
            _PATH,
            json.dumps(body).encode(),
            timeout_s=body["run_timeout"] + _MARGIN_S,
            read=_run_result,
        )
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


def _run_result(answer: Any) -> _RunResult:
    try:
        read = _Answer.model_validate(answer)
    except ValidationError as error:
        raise MayPass(f"an answer of another shape: {error}") from error
    result = read.run_result
    if read.status == "SandboxError" or result is None or result.status == "Error":
        raise MayPass(f"it could not run a program: {read.message[:200] or read.status}")
    return result


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
