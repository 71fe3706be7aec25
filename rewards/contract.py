"""What every scoring function takes and gives. No store, no Prefect, no torch in this folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

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
    off by the token limit. `token_ids` are the completion's, end mark included.
    """

    completion: str
    answer: str | None = None
    sample_id: str = ""
    prompt: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    finish_reason: str = "stop"
    token_ids: Sequence[int] = ()

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
    """A sample that scores `value` (the maximum) under `options`; contract tests run them all."""

    item: RewardInput
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    value: float = 1.0


class Scorer(Protocol):
    """What a file of this folder offers. Contract tests run over `rewards.SCORERS`.

    `score` is a pure function of the item: no order, no clock, no random numbers. It raises
    ordinary errors (the reward stage names reward and sample) and never catches a limit.
    """

    Config: type[ScorerConfig]
    GOLD: Sequence[GoldExample]

    def score(self, item: RewardInput, config: Any) -> Score:
        """Returns how good the completion is."""
        ...

    def check_gold(self, answer: str | None, extra: Mapping[str, Any], config: Any) -> str | None:
        """Returns why the data set's row cannot be graded, or None if it can."""
        ...


@dataclass(frozen=True, slots=True)
class Program:
    """Code to run for a sample: `files` by name, the command that starts it, its input."""

    files: Mapping[str, str]
    command: Sequence[str]
    stdin: str = ""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one program may use; output beyond the limit is cut off."""

    cpu_s: float
    wall_s: float
    memory_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended; `exit_code` is None if it was killed, and `killed_by` says by what."""

    exit_code: int | None
    stdout: str
    stderr: str
    killed_by: Literal["cpu", "wall", "memory", "signal"] | None = None


class Sandbox(Protocol):
    """Runs code that a model wrote, without network and outside the grader's process.

    Scoring functions that run code take one as `score(item, config, sandbox=...)`, so that they
    know nothing of how it isolates.
    """

    def run(self, program: Program, *, limits: SandboxLimits) -> ProgramResult:
        """Returns how `program` ended; a program that misbehaves is a result, not an error.

        Raises:
            OSError: the sandbox itself does not work; the sample is a `grader_error`.
        """
        ...
