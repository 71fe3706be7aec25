"""What the prompts stage takes and gives: data sets in, prompt groups of one step out."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from storage.layout import StepScope
from storage.records import (
    Cursor,
    InputRef,
    Int64,
    PromptInputs,
    Record,
    StageRecord,
    request_digest,
)


class DatasetConfig(BaseModel):
    """One data set of the mixture; `kind` names a file of this folder, `options` its Config."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    name: str | None = None
    """Shown in reports and stored as `domain`; defaults to the kind."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of a step's groups, relative to the other sets."""
    held_out: Annotated[int, Field(ge=0)] = 0
    """Rows set aside for evaluation, chosen by the run's seed, never trained on."""
    options: dict[str, Any] = {}
    """The data set's own settings, validated by its Config at launch."""


class PromptsConfig(BaseModel):
    """Where prompts come from and how many groups a step takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    datasets: Annotated[list[DatasetConfig], Field(min_length=1)]
    groups_per_step: Annotated[int, Field(gt=0)] = 64
    """Prompt groups per step."""
    system_prompt: str | None = None
    """System turn put before every prompt; None leaves it out, "" is an empty turn."""
    template: bool = True
    """Apply the model's chat template; False tokenises the prompt text as it is."""
    max_prompt_tokens: Annotated[int, Field(gt=0)] | None = None
    """Longer prompts are dropped and counted; default: what leaves room for `max_tokens`."""


class PrepareRequest(Record):
    """Reads, checks, templates and tokenises all data sets, once, at launch."""

    config: PromptsConfig
    seed: Int64
    tokenizer: InputRef
    max_prompt_tokens: int


class PromptsRequest(Record):
    """Draws the prompt groups of one step from the stored prompts."""

    scope: StepScope
    seed: Int64
    inputs: PromptInputs
    cursor: Cursor
    round: int = 0
    num_groups: int

    def digest(self) -> str:
        """Returns the request digest: seed, mixture, cursor, round and size, no keys."""
        body = {
            "seed": str(self.seed),
            "mixture": self.inputs.mixture_digest,
            "train": self.inputs.train.sha256,
            "cursor": self.cursor.model_dump(mode="json"),
            "round": self.round,
            "num_groups": self.num_groups,
        }
        return request_digest("prompts", body)


class PromptsResult(Record):
    """The prompts shard is `record.outputs["prompts"]`, one row per group, in plan order."""

    record: StageRecord
    cursor: Cursor
    reused: bool
