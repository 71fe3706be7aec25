"""What the rollout stage takes and gives: one shard of prompt groups in, samples out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage.layout import Scope
from storage.records import (
    InputRef,
    Int64,
    Metrics,
    ObjectRef,
    PolicyRef,
    Probe,
    Record,
    RecordRef,
    SamplingPolicy,
    StageRecord,
    WeightProof,
    redo_field,
    request_digest,
)

MIN_TEMPERATURE = 0.01
"""What vLLM would raise a lower temperature to, so that another one would be recorded."""


class RolloutConfig(BaseModel):
    """How completions are sampled, and the limits of the engine that samples them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    group_size: Annotated[int, Field(gt=0)] = 8
    """Completions per prompt (G)."""
    groups_per_shard: Annotated[int, Field(gt=0)] = 64
    """Groups in one shard: the unit of storage and retry, never of the number of engines."""
    max_tokens: Annotated[int, Field(gt=0)] = 256
    """Most new tokens of a completion."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE)] = 1.0
    mode: Literal["replayable"] = "replayable"
    """`replayable`: one generate call per shard in a fixed order, so bits follow the request."""
    max_model_len: Annotated[int, Field(gt=1)] = 1024
    """Most tokens of prompt + completion."""
    max_num_seqs: Annotated[int, Field(gt=0)] = 128
    """Completions that run at once."""
    kv_cache_bytes: Annotated[int, Field(gt=0)] = 1 << 30
    """Memory for keys and values on CPU; on a GPU `gpu_memory_fraction` decides."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the engine computes in: float32 gives weight proof `exact`, bfloat16 `swap-only`."""
    threads: Annotated[int, Field(gt=0)] = 1
    """CPU threads; part of the request, because results depend on it."""
    enforce_eager: bool = True
    """False compiles the model: minutes at the start, faster afterwards on a GPU."""
    probe_tolerance: Annotated[float, Field(gt=0)] = 1e-3
    """Most |logprob difference| between engine and learner in float32, tightened to a tenth of
    what the swap moved (not below 1e-4); in bfloat16 the mean may be 0.25."""
    python: str | None = None
    """Interpreter of the engine's environment; not part of the request."""

    @model_validator(mode="after")
    def _room_for_an_answer(self) -> "RolloutConfig":
        if self.max_tokens >= self.max_model_len:
            raise ValueError(
                f"rollout.max_tokens ({self.max_tokens}) leaves no room for a prompt within "
                f"rollout.max_model_len ({self.max_model_len}). Lower one or raise the other."
            )
        return self

    def request_fields(self) -> dict[str, Any]:
        """Returns what of this config the bits of a shard depend on."""
        return self.model_dump(
            mode="json",
            exclude={"python", "groups_per_shard", "group_size", "max_tokens", "temperature"},
        )


def requested_config(body: Mapping[str, Any]) -> RolloutConfig:
    """Returns the config behind a record's request: what an engine that replays it starts with.

    Args:
        body: the record's `request`.

    Raises:
        pydantic.ValidationError: this version of the code has no such config.
    """
    limits = body["config"]
    max_tokens = min(body["sampling"]["max_tokens"], limits["max_model_len"] - 1)
    return RolloutConfig.model_validate({**limits, "max_tokens": max_tokens})


class RolloutRequest(Record):
    """Samples rows [start, stop) of `prompts` from `policy`."""

    scope: Scope
    shard: int
    prompts: ObjectRef
    start: int
    stop: int
    sampling: SamplingPolicy
    seed: Int64
    policy: PolicyRef
    model: InputRef
    config: RolloutConfig
    redo: int = 0

    @property
    def stage(self) -> str:
        """The stage's name with its shard, as in keys: `rollout-0003`."""
        return f"rollout-{self.shard:04d}"

    def body(self) -> dict[str, Any]:
        """Returns the digestible part of the request."""
        return {
            "prompts": self.prompts.sha256,
            "rows": [self.start, self.stop],
            "sampling": self.sampling.model_dump(mode="json"),
            "seed": str(self.seed),
            "policy": self.policy.digest,
            "model": self.model.digest,
            "config": self.config.request_fields(),
            **redo_field(self.redo),
        }

    def digest(self) -> str:
        """Returns the request digest."""
        return request_digest("rollout", self.body())


class LoadRequest(Record):
    """Loads and proves `policy` ahead of the request that will sample from it; stores nothing."""

    policy: PolicyRef
    config: RolloutConfig


class LoadResult(Record):
    """What the engine holds now."""

    proof: WeightProof


class RolloutResult(Record):
    """The samples shard is `record.outputs["samples"]`; `reused` if the record was found."""

    record: StageRecord
    reused: bool


class ReplayRequest(Record):
    """Compares a committed samples shard with what its policy says now; writes nothing.

    What is not here stands in the record's request; `prompts`, `policy` and `model` must be what
    that request names by digest.
    """

    scope: Scope
    record: RecordRef
    prompts: ObjectRef
    policy: PolicyRef
    model: InputRef
    how: Literal["regenerated", "forced"] = "regenerated"
    """`regenerated`: sampled again from the same seeds, and teacher-forced only where that gives
    other tokens. `forced`: the stored completions are only scored, in one forward pass each."""


class Difference(Record):
    """One place where a stored sample differs from what was found for it.

    `position` is the index within a list; None where the column holds one value.
    """

    sample_id: str
    column: str
    position: int | None
    expected: str
    found: str


class Comparison(Record):
    """How stored samples compare with what was found for them.

    The figures are of the logprobs of sampled tokens, in the samples that are equal otherwise;
    null where there are none. `where` is the first other difference, else that of the largest
    figure, None if there is none.
    """

    num_samples: int
    num_tokens: int
    num_differing: int
    """Samples that differ in anything but a logprob's value."""
    max_abs_diff: float | None
    mean_abs_diff: float | None
    where: Difference | None


ReplayOutcome = Literal[
    "to the bit", "within tolerance", "not comparable", "differs", "not checked"
]


class ReplayResult(Record):
    """How a committed samples shard compares with what its policy says now.

    `to the bit`: regenerated to equal rows. `within tolerance`: to equal tokens with logprobs
    within `tolerance`, or teacher-forced to such logprobs where bits are not promised.
    `not comparable`: neither, under another environment (`environment_changes` says in what).
    `not checked`: the policy's files are gone, or the stored logprobs cannot be scored.
    """

    stage: str
    outcome: ReplayOutcome
    detail: str
    """In words: figures, or where it differs, or why it was not checked."""
    regenerated: Comparison | None
    forced: Comparison | None
    tolerance: float
    """Most |logprob difference|: of the maximum in float32, of the mean in bfloat16."""
    environment_changes: list[str]
    timings_s: Metrics


@dataclass(frozen=True)
class PromptGroup:
    """One prompt to sample `group_size` completions for; child i samples with seed `seed` + i."""

    group_id: str
    prompt_token_ids: list[int]
    seed: int


def max_new_tokens(group: PromptGroup, sampling: SamplingPolicy, *, config: RolloutConfig) -> int:
    """Returns the most tokens that a completion of `group` may have: what the context leaves."""
    return min(sampling.max_tokens, config.max_model_len - len(group.prompt_token_ids))


@dataclass(frozen=True)
class Completion:
    """One completion as the engine sampled it.

    `token_ids` include the terminating token; `logprobs` are float32, one per token, with
    temperature (0 counts as 1), top_k and top_p applied. `finish_reason` is `stop` or `length`.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_token_id: int | None


@dataclass(frozen=True)
class FinishedGroup:
    """The completions of one prompt group, in sample order."""

    group: PromptGroup
    completions: list[Completion]


@dataclass(frozen=True)
class GivenCompletion:
    """A completion to be scored as it is: nothing is sampled."""

    prompt_token_ids: list[int]
    token_ids: list[int]


class RolloutEngine(Protocol):
    """A warm sampler, keyed by the digest of the policy that it holds."""

    @property
    def config(self) -> RolloutConfig:
        """What the engine was started with."""
        ...

    @property
    def proof(self) -> WeightProof | None:
        """How the engine showed what it holds, or None."""
        ...

    def environment(self) -> dict[str, str]:
        """Returns what the bits depend on besides the request and the installed packages."""
        ...

    @property
    def policy_digest(self) -> str | None:
        """What the engine holds and has proven, or None."""
        ...

    def load(self, policy: PolicyRef, *, directory: Path, probe: Probe) -> WeightProof:
        """Loads the safetensors in `directory` and proves them against `probe`.

        After an error the engine holds nothing and refuses to sample.

        Raises:
            Permanent: the engine does not reproduce the learner's logprobs.
        """
        ...

    def submit(
        self, groups: Sequence[PromptGroup], *, sampling: SamplingPolicy
    ) -> Iterator[FinishedGroup]:
        """Yields every group once, as it finishes.

        Raises:
            Permanent: no proven policy is held.
        """
        ...

    def score(
        self, completions: Sequence[GivenCompletion], *, temperature: float
    ) -> list[list[float]]:
        """Returns each completion's float32 logprobs, one per token, teacher-forced.

        With the temperature (0 counts as 1), without top_k and top_p. What cannot have been
        sampled (ids outside the vocabulary, more tokens than the context holds) is -inf.

        Raises:
            Permanent: no proven policy is held.
        """
        ...
