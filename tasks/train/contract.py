"""What the train stage takes and gives: experience and a state in, the next policy out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage.layout import StepScope
from storage.records import (
    InputRef,
    Int64,
    Metrics,
    ObjectRef,
    PolicyRef,
    Probe,
    Record,
    StageRecord,
    redo_field,
    request_digest,
)

Decay = Annotated[float, Field(ge=0, lt=1)]


class AlgorithmConfig(BaseModel):
    """Which file of `algorithms/`, and its settings (validated by its Config at launch)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str = "grpo"
    options: dict[str, Any] = {}


class TrainConfig(BaseModel):
    """How one step of experience becomes the next policy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    algorithm: AlgorithmConfig = AlgorithmConfig()
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the rate rises linearly; a function of the update index alone."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_updates: Annotated[int, Field(gt=0)] | None = None
    """Updates after which a `linear` or `cosine` schedule has reached its floor."""
    schedule_floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the rate that a `linear` or `cosine` schedule ends at and keeps."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient norm over all ranks is clipped to this."""
    epochs: Annotated[int, Field(gt=0)] = 1
    """Passes over one step's experience."""
    minibatches: Annotated[int, Field(gt=0)] = 1
    """Optimizer updates per pass; groups are divided among them in plan order."""
    micro_batch_tokens: Annotated[int, Field(gt=0)] = 8192
    """Most tokens (rows x longest row) of one forward pass on one rank."""
    max_row_tokens: Annotated[int, Field(gt=0)] = 1024
    """Completions of one group share a row behind their prompt up to this many tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed in and published; masters and moments are float32."""
    ranks: Annotated[int, Field(gt=0)] = 1
    zero_stage: Literal[2, 3] = 2
    threads: Annotated[int, Field(gt=0)] = 1
    """CPU threads per rank; part of the request, because results depend on it."""
    gradient_checkpointing: bool = False
    snapshot_every: Annotated[int, Field(gt=0)] = 10
    """Steps between snapshots of optimizer state; between them, state comes back by replay."""
    snapshot_after_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds of training since the last snapshot after which another is due, whatever the steps:
    about what a replay may cost."""
    rebase_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """A replay that gives other bits on another machine or with other libraries is within
    tolerance if, step by step, its weights differ on average by at most this share of what the
    step had changed them."""
    probe_rows: Annotated[int, Field(gt=0)] = 4
    """Rows of the probe that every policy carries; drawn from the vocabulary by the seed."""
    probe_tokens: Annotated[int, Field(gt=1)] = 64
    """Tokens of one probe row; at most `rollout.max_model_len` - 1."""
    policy_file_bytes: Annotated[int, Field(gt=0)] = 2 << 30
    """Size limit of one safetensors file."""
    python: str | None = None
    """Interpreter of the engine's environment; not part of the request."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> "TrainConfig":
        if self.schedule != "constant" and self.schedule_updates is None:
            raise ValueError(
                f"train.schedule is {self.schedule!r} but train.schedule_updates is not set. "
                "Set it to the number of updates after which the rate is at its floor."
            )
        return self

    def request_fields(self) -> dict[str, Any]:
        """Returns what of this config the bits of an update depend on."""
        return self.model_dump(mode="json", exclude=_NOT_IN_REQUESTS)


_NOT_IN_REQUESTS = {"python", "snapshot_every", "snapshot_after_s", "rebase_tolerance"}
"""What decides when and where, but no bits."""


class ModelConfig(BaseModel):
    """The base model of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    path: str
    """A Hugging Face directory or hub name, or `builtin:<name>` for one that we make."""


class GenesisRequest(Record):
    """Imports the base model as policy 0: a train stage with zero updates."""

    scope: StepScope
    model: InputRef
    weights: dict[str, str]
    """{file name: sha256} of the weights in the model directory on this host."""
    model_dir: str
    """Where the weights lie now; not part of the digest."""
    seed: Int64
    config: TrainConfig
    redo: int = 0

    def body(self) -> dict[str, Any]:
        """Returns the digestible part of the request."""
        return {
            "kind": "genesis",
            "model": self.model.digest,
            "weights": dict(sorted(self.weights.items())),
            "seed": str(self.seed),
            "config": self.config.request_fields(),
            **redo_field(self.redo),
        }

    def digest(self) -> str:
        """Returns the request digest."""
        return request_digest("train", self.body())


class TrainRequest(Record):
    """One step's update: `samples[i]` and `rewards[i]` are shards of the same groups."""

    scope: StepScope
    samples: list[ObjectRef]
    rewards: list[ObjectRef]
    prompts: ObjectRef
    policy: PolicyRef
    """The policy before the update (version v); the result is version v + 1."""
    state_id: str
    """Digest of the previous committed train record: whose trainer state this continues."""
    temperature: float
    update_index: int
    """Optimizer updates before this step; schedules are functions of it."""
    model: InputRef
    config: TrainConfig
    snapshot_due: bool
    rebase: bool = False
    """Whether a replay that gives other bits may be rebased (see DESIGN.md section 5)."""
    redo: int = 0

    def body(self) -> dict[str, Any]:
        """Returns the digestible part of the request."""
        return {
            "kind": "update",
            "samples": [ref.sha256 for ref in self.samples],
            "rewards": [ref.sha256 for ref in self.rewards],
            "policy": self.policy.digest,
            "state_id": self.state_id,
            "temperature": self.temperature,
            "update_index": self.update_index,
            "model": self.model.digest,
            "config": self.config.request_fields(),
            **redo_field(self.redo),
        }

    def digest(self) -> str:
        """Returns the request digest."""
        return request_digest("train", self.body())


class TrainResult(Record):
    """`record.policy` is the new version; `record.outputs["train"]` the train shard."""

    record: StageRecord
    reused: bool


class SnapshotRequest(Record):
    """Stores the held state of a committed step, at a graceful stop; trains nothing."""

    scope: StepScope
    """The committed step that ends in the state."""
    state_id: str
    ranks: int
    zero_stage: int

    def body(self) -> dict[str, Any]:
        """Returns the digestible part of the request: the state alone decides the tensors."""
        return snapshot_body(self.state_id)

    def digest(self) -> str:
        """Returns the request digest."""
        return request_digest("snapshot", self.body())


def snapshot_body(state_id: str) -> dict[str, Any]:
    """Returns the request of a snapshot record: what `history` looks for."""
    return {"kind": "snapshot", "state_id": state_id}


class SnapshotResult(Record):
    """The snapshot's record; None if the trainer held another state and nothing was done."""

    record: StageRecord | None


class ReplayRequest(Record):
    """Runs a committed train stage again from the store alone; writes nothing to it."""

    scope: StepScope
    """The committed step."""
    rebase: bool = False
    """Whether the states before it may be rebased where this environment gives other bits."""
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """See `TrainConfig.rebase_tolerance`."""


ReplayOutcome = Literal["to the bit", "within tolerance", "not comparable", "differs"]


class ReplayResult(Record):
    """How a replayed train stage compares with its record.

    `to the bit`: policy, train shard and, where recorded, state. `not comparable`: other bits under
    another environment (`environment_changes` says in what), or from a state that another one had
    to be rebased for. `differs`: other bits where they are promised; on other devices, beyond
    tolerance under the recorded environment. The figures are of the published
    weights: largest and mean difference over all elements, and the mean over the mean change that
    the step had made (`share`); null where nothing was compared element by element.
    """

    outcome: ReplayOutcome
    policy_digest: str
    expected_policy_digest: str
    state_digest: str | None
    expected_state_digest: str | None
    train_sha256: str | None
    expected_train_sha256: str | None
    environment_changes: list[str]
    max_abs_diff: float | None = None
    mean_abs_diff: float | None = None
    share: float | None = None
    replayed: int
    """Steps replayed before this one to have its state."""


@dataclass(frozen=True)
class TrainSample:
    """One sample that takes part in a gradient."""

    sample_id: str
    group_id: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    loss_mask: list[bool]
    """Per completion token: carries gradient."""
    rollout_logprobs: list[float]
    advantage: float


@dataclass(frozen=True)
class Update:
    """One optimizer update: its samples and the learning rate that applies."""

    samples: list[TrainSample]
    learning_rate: float


@dataclass(frozen=True)
class UpdateResult:
    """What the learner said: logprobs by sample id (before the first update), and metrics."""

    learner_logprobs: dict[str, list[float]]
    metrics: Metrics


@dataclass(frozen=True)
class Deviation:
    """How far the masters, cast to the published dtype, are from published weights.

    `mean_abs_change` is the mean distance of the published weights from those before the step.
    """

    num_elements: int
    """Elements that differ."""
    max_abs_diff: float
    mean_abs_diff: float
    mean_abs_change: float

    @property
    def share(self) -> float:
        """The mean difference over the mean change; infinite if nothing should have changed."""
        if self.mean_abs_diff == 0:
            return 0.0
        return self.mean_abs_diff / self.mean_abs_change if self.mean_abs_change else math.inf


class TrainEngine(Protocol):
    """A warm trainer, keyed by the state id that it holds. Works on local files only."""

    @property
    def state_id(self) -> str | None:
        """Whose trainer state the engine holds; None if fresh, or dirty after a cancelled call."""
        ...

    def configure(self, config: TrainConfig) -> None:
        """Takes another config; the state moves along, to other ranks if those must change."""
        ...

    def vocabulary(self) -> tuple[int, list[int]]:
        """Returns the size of the vocabulary and the special ids, which a probe avoids."""
        ...

    def initialise(self, model_dir: Path) -> None:
        """Takes weights from a Hugging Face directory, fresh optimizer. State id stays None.

        Raises:
            Permanent: weights missing, of another shape, or not finite.
        """
        ...

    def restore(self, snapshot_dir: Path) -> None:
        """Takes masters, moments and RNG from a snapshot directory. State id stays None."""
        ...

    def update(self, updates: Sequence[Update], *, temperature: float) -> UpdateResult:
        """Runs the optimizer updates in order. State id becomes None.

        Raises:
            Permanent: NaN or Inf in loss or gradient; weights are unchanged, samples are named.
        """
        ...

    def environment(self) -> dict[str, str]:
        """Returns what the bits depend on besides the request and the installed packages."""
        ...

    def compare(self, published: Path, before: Path) -> Deviation:
        """Compares the masters with published safetensors; `before` is the version before."""
        ...

    def take(self, published: Path) -> None:
        """Sets masters whose cast differs from the tensors in `published` to those; moments stay.

        State id becomes None.
        """
        ...

    def adopt(self, state_id: str) -> None:
        """Declares what the engine now holds, once the record that names it is stored."""
        ...

    def save_policy(self, directory: Path, *, max_file_bytes: int) -> dict[str, str]:
        """Writes safetensors of the published dtype; returns tied tensors {alias: name}."""
        ...

    def probe(self, token_ids: list[list[int]]) -> Probe:
        """Returns the learner's logprobs of `token_ids` under the published weights."""
        ...

    def save_snapshot(self, directory: Path) -> str:
        """Writes masters, moments, schedule and RNG of every rank; returns the state digest."""
        ...

    def state_digest(self) -> str:
        """Returns the digest over masters, moments and RNG, whatever the files look like."""
        ...
