"""What every scoring function takes and gives. No store, no Prefect, no torch in this folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

Status = Literal["graded", "grader_error", "grader_timeout", "not_applicable"]
"""`graded`: the value says how good it is. The others carry no value, and a failure is never 0."""


# Dataclasses, not pydantic: thousands of them are pickled per step, and a completion may hold
# characters (lone surrogates) that pydantic's strings refuse.
@dataclass(frozen=True, slots=True)
class RewardInput:
    """One sample to score.

    `completion` is the sampled text with its think and answer tags and without the end mark.
    `prompt` is the text before it, where known. `answer` is the gold answer (None: the data set
    has none), `extra` what else the data set says of the row. `truncated`: the completion was cut
    off by the token limit. `token_ids` are the completion's, end mark included. `domain` is the
    data set's name.
    """

    completion: str
    answer: str | None = None
    sample_id: str = ""
    prompt: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    finish_reason: str = "stop"
    token_ids: Sequence[int] = ()
    domain: str = ""

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut the completion off."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Part:
    """One term of a weighted sum, as it is stored: `value` is None unless graded."""

    name: str
    value: float | None
    weight: float
    status: Status
    reason: str | None


@dataclass(frozen=True, slots=True)
class Score:
    """What is said of one sample; `value` is None unless `status` is `graded`.

    `reason` is a short word for people and queries (`no_final_answer`, `hedged`), None where there
    is nothing to add. `parts` are filled where the score is a weighted sum.
    """

    value: float | None
    status: Status = "graded"
    reason: str | None = None
    parts: tuple[Part, ...] = ()


class ScorerConfig(BaseModel):
    """Root of the settings of a scoring function: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class GoldExample:
    """A sample that scores `value` (the maximum) under `options`; contract tests run them all.

    `least` is the minimum under them: below 0 for a penalty.
    """

    item: RewardInput
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    value: float = 1.0
    least: float = 0.0


Needs = Literal["sandbox", "endpoint"]
"""What a scoring function is lent by the stage, beside the sample."""


class GoldChecker(Protocol):
    """What every file of this folder offers. Contract tests run over `rewards.SCORERS`."""

    Config: type[ScorerConfig]
    GOLD: Sequence[GoldExample]

    def check_gold(self, answer: str | None, extra: Mapping[str, Any], config: Any) -> str | None:
        """Returns why the data set's row cannot be graded, or None if it can."""
        ...


class Scorer(GoldChecker, Protocol):
    """A file that needs nothing but the sample; it runs in a process that can be killed.

    `score` is a pure function of the item: no order, no clock, no random numbers. It raises
    ordinary errors (the reward stage names reward and sample) and never catches a limit.
    """

    def score(self, item: RewardInput, config: Any) -> Score:
        """Returns how good the completion is."""
        ...


@dataclass(frozen=True, slots=True)
class Program:
    """Code to run for a sample: `files` by name, the command that starts it, its input.

    The command runs in the folder of the files; `python` as its first word is the sandbox's own
    interpreter.
    """

    files: Mapping[str, str]
    command: Sequence[str]
    stdin: str = ""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one program may use, all its processes together; who takes more is ended.

    Of two joined programs each may use as much, and they sleep when both do.
    """

    cpu_s: float = 10.0
    asleep_s: float = 10.0
    """Seconds in which it neither computes nor waits for a processor; a busy machine adds none."""
    wall_s: float = 120.0
    """Backstop, generous: who reaches it met a machine that is too busy to judge anything."""
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20
    """Of standard output and of standard error, each."""
    file_bytes: int = 64 << 20
    """In its temporary folder, all files together."""
    processes: int = 32


KilledBy = Literal["cpu", "asleep", "wall", "memory", "output", "signal"]


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended; `exit_code` is None if it was killed, and `killed_by` says by what."""

    exit_code: int | None
    stdout: str
    stderr: str
    killed_by: KilledBy | None = None


class Sandbox(Protocol):
    """Runs code that a model wrote, without network and outside the grader's process."""

    joins: bool
    """Whether `run_joined` is offered."""

    def run(self, program: Program, *, limits: SandboxLimits) -> ProgramResult:
        """Returns how `program` ended; a program that misbehaves is a result, not an error.

        Raises:
            OSError: the sandbox itself does not work; the sample is a `grader_error`.
        """
        ...

    def run_joined(
        self, program: Program, *, checker: Program, limits: SandboxLimits
    ) -> tuple[ProgramResult, ProgramResult]:
        """Runs two programs that cannot see each other, joined by a socket at descriptor 3.

        So that a trusted program can question a hostile one. The checker's end ends the program;
        if the program ends first, the checker sees its socket closed.

        Returns:
            How `program` and `checker` ended.

        Raises:
            OSError: the sandbox itself does not work, or offers no such thing.
        """
        ...


class SandboxScorer(GoldChecker, Protocol):
    """A file that runs code: `NEEDS = "sandbox"`."""

    NEEDS: Literal["sandbox"]

    def score(self, item: RewardInput, config: Any, sandbox: Sandbox) -> Score:
        """Returns how good the completion is; limits are the sandbox's, so it may run anywhere."""
        ...


class Refused(OSError):
    """The service is there but has no answer to this one request: others may fare better."""


Read = TypeVar("Read")


class Endpoint(Protocol):
    """A service that answers JSON over HTTP; retries, rate limit and cache are the stage's."""

    def post(self, path: str, body: Mapping[str, Any], *, read: Callable[[Any], Read]) -> Read:
        """Returns what `read` makes of the parsed answer to `body`.

        Args:
            path: begins with a slash.
            body: what is asked; the model's name is added to it.
            read: raises ValueError for an answer that is not what was asked for. Only answers
                that it accepts are kept, so that the same request is sent anew after another.

        Raises:
            ValueError: `read` raised it.
            Refused: the service refuses this request, and would again.
            OSError: no answer came, after all retries; the sample is a `grader_error`.
        """
        ...


class EndpointConfig(ScorerConfig):
    """Root of the settings of a scoring function that asks a service."""

    # Errors would quote the url, and with it a password that does not belong there.
    model_config = ConfigDict(hide_input_in_errors=True)

    url: str | None = None
    """Of the service, without the path that is asked: `http://127.0.0.1:8000`."""
    path: str | None = None
    """Or a model directory that the stage serves itself, with vLLM in a process of its own."""
    arguments: tuple[str, ...] = ()
    """Of that vLLM server, beside ours: `--dtype float32`, `--gpu-memory-utilization 0.2`."""
    model: str | None = None
    """What the service calls the model; None: the first that it lists."""
    api_key_env: str | None = None
    """Environment variable that holds the bearer token; the token itself is stored nowhere."""
    concurrency: Annotated[int, Field(gt=0)] = 16
    """Requests in flight."""
    requests_per_minute: Annotated[int, Field(gt=0)] | None = None
    """None: as fast as `concurrency` allows."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    patience_s: Annotated[float, Field(ge=0)] = 120.0
    """How long a request is tried again while the service is away, busy or broken."""

    @model_validator(mode="after")
    def _one_service(self) -> "EndpointConfig":
        if (self.url is None) == (self.path is None):
            raise ValueError(
                "Expected `url` (a running service) or `path` (a model directory that is served "
                f"for the run), one of the two; got url={self.url!r}, path={self.path!r}."
            )
        if self.url is None:
            if self.api_key_env is not None:
                raise ValueError("api_key_env belongs to `url`: a model of `path` has its own key.")
        elif self.arguments:
            raise ValueError("arguments belong to `path`: a service at `url` is started already.")
        else:
            _check_url(self.url)
        return self


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        # Not quoted: it holds a secret, and the resolved config is stored.
        raise ValueError("The url holds a user or password. Name a variable with api_key_env.")
    usable = parts.scheme in ("http", "https") and parts.hostname
    if not usable or parts.query or parts.fragment or parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(
            f"{url!r} is not the address of a service. Expected http(s)://host:port without "
            "`/v1` and without a query: paths are added to it."
        )


HOW_IT_IS_ASKED = frozenset(
    {"api_key_env", "concurrency", "requests_per_minute", "request_timeout_s", "patience_s"}
)
"""Settings of an EndpointConfig that no reward depends on."""


class EndpointScorer(GoldChecker, Protocol):
    """A file that asks a service: `NEEDS = "endpoint"`, and its Config is an EndpointConfig."""

    NEEDS: Literal["endpoint"]
    SERVES: Literal["generate", "classify"]
    """How vLLM serves a model of `path`."""

    def batch_items(self, config: Any) -> int:
        """Returns how many samples go into one call of `score_batch`."""
        ...

    def score_batch(
        self, items: Sequence[RewardInput], config: Any, endpoint: Endpoint
    ) -> Sequence[Score]:
        """Returns one score per item, in order."""
        ...
