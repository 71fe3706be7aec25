"""What the reward stage takes and gives: a samples shard in, a rewards shard out."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rewards import is_foreign, needs, scorer
from rewards.contract import HOW_IT_IS_ASKED, RewardInput, Score
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

    # Errors quote no input: an address may hold a password.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    kind: str
    """A file of `rewards/`: exact, numeric, math, format ..."""
    name: str | None = None
    """Stored with the part's value; defaults to the kind."""
    weight: float = 1.0
    accuracy: bool = False
    """This part's value (1.0 or not) is what evaluations count as accuracy."""
    domains: list[str] = []
    """Grades only samples whose `domain_column` holds one of these; empty: all. Elsewhere the part
    is `not_applicable`."""
    gate: bool = False
    """Where this part's value is below 1, the sample's reward is this part's value x weight
    alone ("format first"), and parts that cost a sandbox or a request are not asked."""
    options: dict[str, Any] = {}
    """The scoring function's own settings, validated by its Config."""

    @property
    def stored_name(self) -> str:
        """What the part is called in a rewards shard."""
        return self.name or self.kind

    @model_validator(mode="after")
    def _options_are_the_scorers(self) -> "RewardPart":
        # Whoever reads a stored config must not run what it names: see `check_code`.
        if not is_foreign(self.kind):
            scorer(self.kind).Config.model_validate(self.options)
        return self

    def request_fields(self) -> dict[str, Any]:
        """Returns what of this part the rewards depend on."""
        fields = self.model_dump(mode="json", exclude=_unset(self, "domains", "gate"))
        if not is_foreign(self.kind) and needs(self.kind) == "endpoint":
            said: dict[str, Any] = fields["options"]
            fields["options"] = {
                name: value for name, value in said.items() if name not in HOW_IT_IS_ASKED
            }
        return fields

    def check_code(self) -> None:
        """Loads code of the user's and checks the settings against it; before a run grades by it.

        Raises:
            ValueError: it does not load, or refuses its settings.
        """
        try:
            scorer(self.kind).Config.model_validate(self.options)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(step) for step in first["loc"])
            words = first["msg"].removeprefix("Value error, ")
            words = f"{where}: {words}" if where else words
            raise ValueError(f"Reward {self.stored_name!r} does not work: {words}") from error


class SandboxConfig(BaseModel):
    """Where programs of a model run."""

    # Errors quote no input: an address may hold a password.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    backend: Literal["bubblewrap", "http"] = "bubblewrap"
    """`http`: a sandbox service that offers `POST /run_code`."""
    url: str | None = None
    """Of the sandbox service."""
    api_key_env: str | None = None
    """Environment variable that holds the service's bearer token."""
    concurrency: Annotated[int, Field(gt=0)] = 4
    """Programs that run at once."""
    patience_s: Annotated[float, Field(ge=0)] = 120.0
    """How long a program is tried again while the service is away."""
    allow_unsandboxed: bool = False
    """DANGER: run programs of the model as plain processes of this user, with files and network."""

    @model_validator(mode="after")
    def _a_service_has_an_address(self) -> "SandboxConfig":
        if (self.backend == "http") != (self.url is not None):
            raise ValueError(
                "reward.sandbox.url belongs to reward.sandbox.backend=http. Set both or neither."
            )
        if self.url is not None and "@" in urlsplit(self.url).netloc:
            raise ValueError(
                "reward.sandbox.url holds a user or password, and the config is stored. Name a "
                "variable with api_key_env."
            )
        return self


class RewardConfig(BaseModel):
    """How completions are graded, and what one sample may cost."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    parts: Annotated[list[RewardPart], Field(min_length=1)]
    cpu_limit_s: Annotated[float, Field(gt=0)] = 3.0
    """CPU seconds one sample may take, all parts together."""
    wall_limit_s: Annotated[float, Field(gt=0)] = 60.0
    """Backstop for a sample that waits instead of computing."""
    memory_limit_bytes: Annotated[int, Field(gt=0)] = 2 << 30
    """Address space one worker may grow by."""
    combine: Literal["sum", "normalised_sum"] = "sum"
    """`normalised_sum`: every part's values are first brought to mean 0 and deviation 1 within
    their prompt group, so that no part drowns another by its scale."""
    domain_column: str = "domain"
    """What `domains` of parts look at: the data set's name, or a key of the prompt's extra."""
    sandbox: SandboxConfig = SandboxConfig()
    workers: Annotated[int, Field(gt=0)] = 2
    recycle_after: Annotated[int, Field(gt=0)] = 2000
    """A worker is replaced after so many samples: what libraries leak or cache goes with it."""
    python: str | None = None
    """Interpreter of the engines' environment, for models that the stage serves itself."""
    max_failed_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """A shard with a larger share of samples without a reward stops its step (promise 5)."""

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
        """Returns what of this config the rewards depend on.

        What a later version added is left out where it says nothing, so that requests of runs
        that were begun without it keep their digests.
        """
        fields = self.model_dump(mode="json", exclude=_NO_PART)
        fields["parts"] = [part.request_fields() for part in self.parts]
        silent = _unset(self, "combine", "domain_column")
        if fields["sandbox"] == _NO_SANDBOX.model_dump(mode="json", exclude=_NO_PART["sandbox"]):
            silent.add("sandbox")
        return {name: value for name, value in fields.items() if name not in silent}


_NO_PART: Any = {
    "workers": True,
    "recycle_after": True,
    "max_failed_share": True,
    "python": True,
    "sandbox": {"concurrency", "patience_s", "api_key_env"},
}
_NO_SANDBOX = SandboxConfig()


def _unset(model: BaseModel, *names: str) -> set[str]:
    """Returns those fields that have their default."""
    fields = type(model).model_fields
    return {name for name in names if getattr(model, name) == fields[name].default}


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


Mode = Literal["score", "check_gold"]
"""`check_gold` looks at the data set's side only: a score without value names a bad gold."""

Progress = Callable[[str, int, int], None]
"""Told what is graded, and of how many samples how many are done."""


class RewardEngine(Protocol):
    """Grades samples where they can be killed; holds nothing that results depend on."""

    def grade(
        self,
        items: Sequence[RewardInput],
        *,
        config: RewardConfig,
        mode: Mode = "score",
        about: str = "",
    ) -> list[tuple[Score, ...]]:
        """Returns the scores of every item in the order of `items`, one per part of `config`.

        Whatever an item does, the others are graded: its own score says what became of it.
        `about` says what is graded, to whoever watches.

        Raises:
            Transient: the grading processes do not start, or a service answers nobody.
            ValueError: no sandbox is possible here, or an endpoint's settings are unusable.
        """
        ...

    def describe(self, config: RewardConfig) -> dict[str, str]:
        """Returns what beside our own code decides the rewards: sandbox, models, user's code."""
        ...
