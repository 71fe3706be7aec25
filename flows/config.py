"""RunConfig: everything that decides what a run does, assembled from the stages' own configs."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from storage.layout import RUN_NAME
from tasks.prompts.contract import PromptsConfig
from tasks.prompts.opening import check_options
from tasks.reward.contract import RewardConfig
from tasks.rollout.contract import MIN_TEMPERATURE, RolloutConfig
from tasks.train.algorithms import ALGORITHMS
from tasks.train.contract import ModelConfig, TrainConfig


class EvalSuite(BaseModel):
    """How held-out prompts are sampled; nothing here has to agree with training."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    completions: Annotated[int, Field(gt=0)] = 1
    """Completions per prompt (n)."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy, else at least 0.01."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 is off."""
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    """Default: `rollout.max_tokens`."""
    max_prompts: Annotated[int, Field(gt=0)] | None = None
    """The first so many held-out prompts; default: all."""

    @model_validator(mode="after")
    def _temperature_makes_sense(self) -> "EvalSuite":
        if self.temperature == 0 and self.completions > 1:
            raise ValueError(
                f"A greedy suite (temperature 0) with {self.completions} completions samples the "
                "same text again. Set completions to 1 or a temperature above 0."
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}. Expected 0 (greedy) or at least "
                f"{MIN_TEMPERATURE}: the engine samples no colder."
            )
        return self


class EvaluateConfig(BaseModel):
    """When held-out accuracy is measured, and how. Version 0 and the last one always are."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    every: Annotated[int, Field(gt=0)] = 20
    """Steps between evaluations."""
    suites: Annotated[dict[str, EvalSuite], Field(min_length=1)] = {"held_out": EvalSuite()}
    """By name; the first one is what progress and reports show as accuracy."""

    @model_validator(mode="after")
    def _names_can_be_keys(self) -> "EvaluateConfig":
        for name in self.suites:
            if not RUN_NAME.fullmatch(name):
                raise ValueError(
                    f"Suite name {name!r} is not usable. Expected 1 to 64 letters, digits, '.', "
                    "'_' or '-', starting with a letter or digit."
                )
        return self


class RetentionConfig(BaseModel):
    """What `rollbook gc` keeps; all commits, plans, records and experience stay whatever this says.

    Genesis, steps that a fork began from, and snapshots after a rebase are always kept.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    policies_last: Annotated[int, Field(ge=2)] = 2
    """The newest is sampled from; an update is measured by the one before it."""
    policies_every: Annotated[int, Field(gt=0)] | None = None
    """Steps between policies that stay. Default: `evaluate.every`, so that what was evaluated can
    be exported."""
    snapshots_last: Annotated[int, Field(ge=2)] = 2
    """If the newest cannot be read, the one before it is taken."""
    snapshots_every: Annotated[int, Field(gt=0)] = 100
    """Of the snapshots within so many steps the first stays. A snapshot is six times its policy in
    bfloat16; without one, a state comes back by replay."""
    pinned: list[Annotated[int, Field(ge=0)]] = []
    """Steps whose policies stay, with the nearest snapshot before each."""


Placement = Literal["local", "service", "per-step"]


class PlacementConfig(BaseModel):
    """Where engines live. Decides no bits: it may change from step to step.

    `local`: children of the run's own process. `service`: long-lived flow runs on a GPU work pool,
    found through the store. `per-step`: a flow run per stage, with the engine's start in each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rollout: Placement = "local"
    train: Placement = "local"
    reward: Literal["local", "per-step"] = "local"
    """`per-step`: on the pool `reward-cpu`, a flow run per shard."""
    rollout_services: Annotated[int, Field(ge=0)] = 1
    """How many are kept alive through their deployment; more may join. 0: others start them."""
    train_services: Annotated[int, Field(ge=0, le=1)] = 1
    """Likewise."""
    idle_s: Annotated[float, Field(gt=0)] = 900.0
    """A service that was started here ends after so many seconds without a call."""
    wait_s: Annotated[float, Field(gt=0)] = 600.0
    """How long a stage waits for a service, or a flow run for a worker, before it fails."""
    stall_s: Annotated[float, Field(gt=0)] = 600.0
    """A call without progress for so many seconds is taken for hung. Longer than the longest load
    of weights, transfer of a snapshot or compilation."""
    stage_timeout_s: Annotated[float, Field(gt=0)] = 7200.0
    """`per-step`: a stage's flow run that takes longer is cancelled."""
    allow_other_environment: bool = False
    """Whether a service or worker may run other libraries or code than the run's last steps."""


class RunConfig(BaseModel):
    """One complete run. Recipes return it; `--set` overrides are validated by it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    recipe: str = "custom"
    model: ModelConfig
    prompts: PromptsConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    retention: RetentionConfig = RetentionConfig()
    topology: Literal["colocated"] = "colocated"
    """A file of `flows/topologies/`: how stages overlap."""
    placement: PlacementConfig = PlacementConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds prompts, sampling and the probe."""
    steps: Annotated[int, Field(gt=0)] = 100
    """RL steps that `launch` runs; schedules never read it."""
    max_silent_steps: Annotated[int, Field(gt=0)] = 5
    """Stop after so many steps in a row in which every completion was cut off and nothing was
    learnt from."""

    @model_validator(mode="after")
    def _stages_fit_together(self) -> "RunConfig":
        _check_data_sets(self)
        _check_group_size(self)
        _check_batch(self)
        _check_lengths(self)
        return self


def _check_data_sets(config: RunConfig) -> None:
    try:
        check_options(config.prompts)
    except ValidationError as error:
        raise ValueError(f"prompts.datasets: {in_one_line(error)}") from error


_WORDS = {"extra_forbidden": "there is no such setting"}


def in_one_line(error: ValidationError) -> str:
    """Returns what pydantic found wrong, field by field, for a person."""
    parts: list[str] = []
    for found in error.errors():
        where = ".".join(str(part) for part in found["loc"])
        text = _WORDS.get(found["type"], found["msg"].removeprefix("Value error, "))
        value = "" if isinstance(found["input"], dict) else f" (found {found['input']!r})"
        parts.append(f"{where}: {text}{value}" if where else text)
    line = "; ".join(part.rstrip(".") for part in parts)
    return line if line.endswith("?") else f"{line}."


def _check_group_size(config: RunConfig) -> None:
    algorithm = ALGORITHMS.get(config.train.algorithm.kind)
    if algorithm is None:
        raise ValueError(
            f"train.algorithm.kind is {config.train.algorithm.kind!r}. "
            f"Expected one of: {', '.join(sorted(ALGORITHMS))}."
        )
    try:
        algorithm.Config.model_validate(config.train.algorithm.options)
    except ValidationError as error:
        raise ValueError(f"train.algorithm.options: {in_one_line(error)}") from error
    if config.rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size is {config.rollout.group_size}, but "
            f"{config.train.algorithm.kind} takes its baseline from the group, and a group of one "
            "has none: every advantage would be 0. Set rollout.group_size to 2 or more."
        )


def _check_batch(config: RunConfig) -> None:
    groups, minibatches = config.prompts.groups_per_step, config.train.minibatches
    if groups % minibatches:
        raise ValueError(
            f"prompts.groups_per_step ({groups}) cannot be divided into train.minibatches "
            f"({minibatches}) equal parts. Make the first a multiple of the second."
        )
    per_update, ranks = groups // minibatches, config.train.ranks
    if per_update % ranks:
        raise ValueError(
            f"An optimizer update has {per_update} prompt groups, which train.ranks ({ranks}) "
            "cannot divide. Make prompts.groups_per_step / train.minibatches a multiple of it."
        )


def _check_lengths(config: RunConfig) -> None:
    rollout = config.rollout
    prompt_tokens = config.prompts.max_prompt_tokens
    if prompt_tokens and prompt_tokens + rollout.max_tokens > rollout.max_model_len:
        raise ValueError(
            f"prompts.max_prompt_tokens ({prompt_tokens}) + rollout.max_tokens "
            f"({rollout.max_tokens}) exceed rollout.max_model_len ({rollout.max_model_len}). "
            "Raise the last or lower one of the others."
        )
    if config.train.probe_tokens >= rollout.max_model_len:
        raise ValueError(
            f"train.probe_tokens ({config.train.probe_tokens}) must stay below "
            f"rollout.max_model_len ({rollout.max_model_len}): the engine decodes one more token."
        )
    for name, suite in config.evaluate.suites.items():
        if (suite.max_tokens or 0) >= rollout.max_model_len:
            raise ValueError(
                f"evaluate.suites.{name}.max_tokens ({suite.max_tokens}) leaves no room for a "
                f"prompt within rollout.max_model_len ({rollout.max_model_len})."
            )


def max_prompt_tokens(config: RunConfig) -> int:
    """Returns the longest prompt that leaves room for a whole answer."""
    rollout = config.rollout
    return config.prompts.max_prompt_tokens or rollout.max_model_len - rollout.max_tokens
