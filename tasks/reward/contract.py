"""What the reward stage takes and gives: a samples shard in, a rewards shard out."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from storage.layout import Scope
from storage.records import InputRef, ObjectRef, Record, StageRecord, request_digest


class RewardPart(BaseModel):
    """One scoring function and its weight in the sum."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    """A file of `rewards/`: exact, numeric, math, format ..."""
    name: str | None = None
    """Stored with the part's value; defaults to the kind."""
    weight: float = 1.0
    accuracy: bool = False
    """This part's value (1.0 or not) is what evaluations count as accuracy."""
    options: dict[str, Any] = {}
    """The scoring function's own settings, validated by its Config at launch."""


class RewardConfig(BaseModel):
    """How completions are graded, and what one sample may cost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        }

    def digest(self) -> str:
        """Returns the request digest."""
        return request_digest("reward", self.body())


class RewardResult(Record):
    """The rewards shard is `record.outputs["rewards"]`; `reused` if the record was found."""

    record: StageRecord
    reused: bool
