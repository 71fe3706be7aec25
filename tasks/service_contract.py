"""What a stage's service and its client say to each other. No HTTP library in here."""

from typing import Any, Literal

from pydantic import Field

from storage.records import InputRef, Record
from storage.store_config import StoreConfig
from tasks.errors import Permanent, Transient

STAGE_FAILED = 424
"""HTTP status of an answer whose body is an `ErrorBody`."""


class ServiceSpec(Record):
    """Which stage to serve with which engine, and where it finds store and model."""

    stage: str
    """Dotted path of a module with `run(request, store, engine, *, workspace)` and `REQUESTS`."""
    engine: str
    """Dotted path of a module with `start(config, *, model_dir, workspace)`."""
    config: dict[str, Any]
    model: InputRef
    store: StoreConfig
    writing: bool = True
    """False opens the store for reading: for stages that replay and write nothing."""
    run: str | None = None
    """Serve only this run, and only what the store bears out; None trusts whoever has the token:
    the parent."""
    drain_s: float = 0.0
    """How long calls in flight may go on when the service is told to end."""
    home: str
    token_file: str
    """Holds the bearer token; mode 600."""
    port_file: str
    """Where the service writes the port that it listens on."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    parent_pid: int | None = None
    """The service ends when this process does, which starts it and holds its standard input."""


MAX_REQUEST_BYTES = 8 << 20
"""A train request of 4,096 shards is half of it."""


class RunCall(Record):
    """The body of `POST /run`: a request of the stage, tagged with the name of its class."""

    type: str
    request: dict[str, Any]


class ErrorBody(Record):
    """Why a call failed: retry or not, the original class, and its message."""

    kind: Literal["transient", "permanent"]
    type: str
    message: str

    @classmethod
    def of(cls, error: Transient | Permanent) -> "ErrorBody":
        """Returns what to send for `error`."""
        kind = "transient" if isinstance(error, Transient) else "permanent"
        cause = error.__cause__
        return cls(kind=kind, type=type(cause or error).__name__, message=str(error))

    def to_error(self) -> Transient | Permanent:
        """Returns the error to raise on the other side."""
        return Transient(self.message) if self.kind == "transient" else Permanent(self.message)


class Answer(Record):
    """The end of an answered `POST /run`: the stage's result or its error.

    Blank lines come before it, one at each sign of progress, so that whoever waits can tell a call
    that takes long from one that hangs.
    """

    result: dict[str, Any] | None = None
    error: ErrorBody | None = None


class Health(Record):
    """How the service is: `message` says what it is doing, or why it failed."""

    status: Literal["starting", "ready", "failed", "ending"]
    message: str
    error: ErrorBody | None = None
    policy_version: int | None = None
    """What the engine serves, once proven; None for engines that serve no policy."""
    policy_digest: str | None = None
    num_calls: int = 0
    """Calls answered since the start, errors included."""
    queue: int = 0
    """Calls that wait for the one that the engine is busy with."""
    busy_s: float | None = None
    """How long the present call takes so far; None while idle."""
    progress: int = 0
    """Grows while the engine works."""
    tokens_per_s: float | None = None
    """Of the last call that sampled."""
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    """What decides the bits that this service makes, as far as it is known before a call."""
