"""What the prompts stage takes and gives: data sets in, prompt groups of one step out."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage.layout import StepScope
from storage.records import (
    Cursor,
    InputRef,
    Int64,
    PromptInputs,
    Record,
    StageRecord,
    redo_field,
    request_digest,
)


class DatasetConfig(BaseModel):
    """One data set of the mixture; `kind` names a file of this folder, `options` its Config."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str
    name: str | None = None
    """Shown in reports and stored as `domain`; defaults to the kind."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of a step's groups, relative to the other sets."""
    held_out: Annotated[int, Field(ge=0)] = 0
    """Rows set aside for evaluation, chosen by the run's seed, never trained on."""
    options: dict[str, Any] = {}
    """The data set's own settings, validated by its Config at launch."""

    @property
    def label(self) -> str:
        """What the set is called in reports, ids and cursors."""
        return self.name or self.kind


class PromptsConfig(BaseModel):
    """Where prompts come from and how many groups a step takes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    datasets: Annotated[list[DatasetConfig], Field(min_length=1)]
    groups_per_step: Annotated[int, Field(gt=0)] = 64
    """Prompt groups per step."""
    system_prompt: str | None = None
    """System turn put before every prompt that has none; None adds none, "" is an empty turn."""
    template: bool = True
    """Apply the model's chat template; False tokenises the prompt text as it is."""
    max_prompt_tokens: Annotated[int, Field(gt=0)] | None = None
    """Longer prompts are dropped and counted; default: what leaves room for `max_tokens`."""

    @model_validator(mode="after")
    def _sets_have_own_names(self) -> "PromptsConfig":
        labels = [dataset.label for dataset in self.datasets]
        repeated = sorted({label for label in labels if labels.count(label) > 1})
        if repeated:
            raise ValueError(
                f"prompts.datasets names {repeated} more than once. Expected one name per set, "
                "because cursors and reports go by it: set `name`."
            )
        return self

    @model_validator(mode="after")
    def _system_prompt_has_a_template(self) -> "PromptsConfig":
        if self.system_prompt is not None and not self.template:
            raise ValueError(
                "prompts.system_prompt needs prompts.template: without a chat template there are "
                "no turns. Leave system_prompt out, or write it into the prompts."
            )
        return self


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
    """The cursor of the previous commit, for every round of the step."""
    round: Annotated[int, Field(ge=0)] = 0
    """Round r holds groups [r * num_groups, (r + 1) * num_groups) of the step."""
    num_groups: Annotated[int, Field(gt=0)]
    redo: int = 0

    def body(self) -> dict[str, Any]:
        """Returns the digestible part of the request: seed, mixture, cursor, round and size."""
        return {
            "seed": str(self.seed),
            "mixture": self.inputs.mixture_digest,
            "train": self.inputs.train.sha256,
            "cursor": self.cursor.model_dump(mode="json"),
            "round": self.round,
            "num_groups": self.num_groups,
            **redo_field(self.redo),
        }

    def digest(self) -> str:
        """Returns the request digest."""
        return request_digest("prompts", self.body())


class PromptsResult(Record):
    """The prompts shard is `record.outputs["prompts"]`, one row per group, in plan order."""

    record: StageRecord
    cursor: Cursor
    reused: bool
