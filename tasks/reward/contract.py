"""What the reward stage takes and gives: a samples shard in, a rewards shard out."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rewards import scorer
from rewards.contract import RewardInput, Score
from storage.layout import Scope
from storage.records import (
    InputRef,
    ObjectRef,
    Record,
    StageRecord,
    redo_field,
    request_digest,
)


class RewardPart(BaseModel):
    """One scoring function and its weight in the sum."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str
    """A file of `rewards/`: exact, numeric, math, format ..."""
    name: str | None = None
    """Stored with the part's value; defaults to the kind."""
    weight: float = 1.0
    accuracy: bool = False
    """This part's value (1.0 or not) is what evaluations count as accuracy."""
    options: dict[str, Any] = {}
    """The scoring function's own settings, validated by its Config."""

    @property
    def stored_name(self) -> str:
        """What the part is called in a rewards shard."""
        return self.name or self.kind

    @model_validator(mode="after")
    def _options_are_the_scorers(self) -> "RewardPart":
        scorer(self.kind).Config.model_validate(self.options)
        return self


class RewardConfig(BaseModel):
    """How completions are graded, and what one sample may cost."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    parts: Annotated[list[RewardPart], Field(min_length=1)]
    cpu_limit_s: Annotated[float, Field(gt=0)] = 5.0
    """CPU seconds one sample may take, all parts together."""
    wall_limit_s: Annotated[float, Field(gt=0)] = 60.0
    """Backstop for a sample that waits instead of computing."""
    memory_limit_bytes: Annotated[int, Field(gt=0)] = 2 << 30
    """Address space one worker may grow by."""
    workers: Annotated[int, Field(gt=0)] = 2
    max_failed_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """A step with a larger share of samples without a reward stops (promise 5)."""

    @model_validator(mode="after")
    def _parts_can_be_told_apart(self) -> "RewardConfig":
        names = [part.stored_name for part in self.parts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"reward.parts has several parts named {', '.join(twice)}. Give each its own name."
            )
        if sum(part.accuracy for part in self.parts) > 1:
            raise ValueError("reward.parts flags several parts as accuracy. Flag at most one.")
        return self

    @property
    def accuracy_part(self) -> RewardPart:
        """The part that counts as accuracy: the flagged one, else the first."""
        return next((part for part in self.parts if part.accuracy), self.parts[0])

    def request_fields(self) -> dict[str, Any]:
        """Returns what of this config the rewards depend on."""
        return self.model_dump(mode="json", exclude={"workers", "max_failed_share"})


class RewardRequest(Record):
    """Grades `samples` against the answers in `prompts`."""

    scope: Scope
    shard: int
    samples: ObjectRef
    prompts: ObjectRef
    model: InputRef
    config: RewardConfig
    redo: int = 0

    @property
    def stage(self) -> str:
        """The stage's name with its shard, as in keys: `reward-0003`."""
        return f"reward-{self.shard:04d}"

    def body(self) -> dict[str, Any]:
        """Returns the digestible part of the request."""
        return {
            "samples": self.samples.sha256,
            "prompts": self.prompts.sha256,
            "model": self.model.digest,
            "config": self.config.request_fields(),
            **redo_field(self.redo),
        }

    def digest(self) -> str:
        """Returns the request digest."""
        return request_digest("reward", self.body())


class RewardResult(Record):
    """The rewards shard is `record.outputs["rewards"]`; `reused` if the record was found."""

    record: StageRecord
    reused: bool


class RewardEngine(Protocol):
    """Grades samples in processes that can be killed; holds nothing that results depend on."""

    def grade(
        self,
        items: Sequence[RewardInput],
        *,
        config: RewardConfig,
        mode: Literal["score", "check_gold"] = "score",
    ) -> list[tuple[Score, ...]]:
        """Returns the scores of every item in the order of `items`, one per part of `config`.

        Raises:
            Transient: the grading processes do not start.
        """
        ...
