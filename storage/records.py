"""The records that the store keeps: frozen pydantic models whose bytes are canonical JSON.

Keys are spelled in `layout`, Parquet schemas in `schemas`; nothing here touches a store.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError

RECORD_SCHEMA_VERSION = 1
MAX_FAULTS = 3
"""How many fields a message names; a reader starts with the first anyway."""

Int64 = Annotated[int, BeforeValidator(int), PlainSerializer(str, return_type=str)]
"""A 64-bit integer; in JSON a string, because readers of JSON round integers past 2**53."""

Metrics = dict[str, float | None]
"""Named numbers; null where a number was not finite."""


def sha256_hex(payload: bytes | memoryview) -> str:
    """Returns the lower-case hex sha256 of `payload`."""
    return hashlib.sha256(payload).hexdigest()


def canonical_json(value: Any) -> bytes:
    """Returns the one JSON encoding of `value` that digests are taken over.

    Keys sorted, no spaces, UTF-8, non-finite numbers as null, lone surrogates (which no decoder
    of JSON takes back) as their escapes.

    Args:
        value: plain JSON values (what `model_dump(mode="json")` returns).

    Raises:
        TypeError: `value` holds something that JSON has no word for.
    """
    text = json.dumps(_encodable(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8")


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_encodable(str(key)): _encodable(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_encodable(item) for item in value]
    return value


class Record(BaseModel):
    """A frozen value with one canonical encoding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """Returns the canonical JSON bytes of this record."""
        return canonical_json(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, payload: bytes) -> Self:
        """Parses stored bytes.

        Raises:
            pydantic.ValidationError: the bytes are not this record.
        """
        return cls.model_validate_json(payload)

    def content_digest(self) -> str:
        """Returns the sha256 of the canonical bytes."""
        return sha256_hex(self.to_bytes())


def why_invalid(error: ValueError) -> str:
    """Returns in one line which fields of a record do not hold, and why.

    Args:
        error: what `from_bytes` raised.
    """
    if not isinstance(error, ValidationError):
        return str(error)
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    named = [(".".join(str(part) for part in fault["loc"]), fault["msg"]) for fault in faults]
    said = [f"{field}: {problem}" if field else problem for field, problem in named[:MAX_FAULTS]]
    more = [f"{len(named) - MAX_FAULTS} more"] if len(named) > MAX_FAULTS else []
    return "; ".join([*said, *more])


class ObjectRef(Record):
    """Names one stored object and what its bytes must hash to."""

    key: str
    sha256: str
    num_bytes: int
    rows: int | None = None


class RecordRef(Record):
    """Names one stage record; `sha256` is over its stored bytes."""

    stage: str
    key: str
    sha256: str
    request_digest: str


class InputRef(Record):
    """A content-addressed set of files under `inputs/<digest>/`.

    `digest` is the sha256 over the canonical list of (file name, sha256), so equal contents
    have one address, whoever uploads them.
    """

    digest: str
    files: dict[str, ObjectRef]


class PromptSet(Record):
    """One data set of the mixture, as it was found at launch."""

    name: str
    weight: float
    train_rows: int
    held_out_rows: int
    dropped: dict[str, int]


class PromptInputs(Record):
    """All prompts of a run: tokenised once at launch and stored by digest.

    `train` and `held_out` are prompt shards, ordered by set and then by row of the set.
    """

    mixture_digest: str
    sets: list[PromptSet]
    train: ObjectRef
    held_out: ObjectRef


class SetCursor(Record):
    """How far one data set has been consumed: `position` within the permutation of `epoch`.

    `deferred` are row indices of this epoch that were passed over, because they already stood in
    the step that crossed into the epoch; they come first.
    """

    epoch: int = 0
    position: int = 0
    deferred: list[int] = []


class Cursor(Record):
    """What of the mixture has been consumed after a step; commits chain it."""

    drawn: int = 0
    sets: dict[str, SetCursor] = {}


class SamplingPolicy(Record):
    """Every sampling field, explicit; model defaults play no part (promise 6).

    `top_k` 0 means off. `stop_token_ids` are resolved from the model at launch.
    """

    group_size: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int
    stop_token_ids: list[int]


class Probe(Record):
    """Fixed token ids and what the learner says of them under one policy (temperature 1).

    `logprobs[i][t]` is the float32 logprob of `token_ids[i][t]` given the tokens before it; the
    first is null. `next_token_ids[i]` and `next_logprobs[i]` are the learner's argmax after the
    last token and its logprob: the token that an engine must decode.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float | None]]
    next_token_ids: list[int]
    next_logprobs: list[float]


class PolicyRef(Record):
    """One policy version.

    `digest` is the sha256 over the tensors in name order (name, dtype, shape, bytes), tied
    tensors once, independent of how they are sharded into `files`.
    """

    version: int
    digest: str
    encoding: Literal["full"] = "full"
    dtype: str
    tied: dict[str, str] = {}
    files: list[ObjectRef]
    probe: ObjectRef


class SnapshotRef(Record):
    """Trainer state of one version: the files of every rank, and the layout of those files."""

    files: dict[str, ObjectRef]
    ranks: int
    zero_stage: int


class WeightProof(Record):
    """How an engine showed that it holds the policy it must sample from (promise 4).

    `exact`: the probe separates neighbouring versions. `swap-only`: the file digest carries the
    proof, and the probe differs from the previous version's. `tolerance` bounds the maximum where
    engine and learner compute in float32, else the mean.
    """

    kind: Literal["exact", "swap-only"]
    policy_version: int
    policy_digest: str
    max_abs_diff: float
    mean_abs_diff: float
    tolerance: float
    num_tokens: int


class Rebase(Record):
    """How replayed masters were set to the published weights where they differed (promise 3).

    `steps` were replayed in the environment `now` instead of the recorded `was` (digests).
    `max_abs_diff` and `num_elements` are over all of them; `share` is the largest mean difference
    of a step over the mean change that the step had made.
    """

    steps: list[int]
    num_elements: int
    max_abs_diff: float
    share: float
    was: str
    now: str


class StageRecord(Record):
    """The result of one stage for one request; whoever finds it does no work.

    `request` is the body whose digest is `request_digest`; `environment` names what ran it.
    """

    schema_version: int = RECORD_SCHEMA_VERSION
    stage: str
    request: dict[str, Any]
    request_digest: str
    outputs: dict[str, ObjectRef]
    policy: PolicyRef | None = None
    snapshot: SnapshotRef | None = None
    state_digest: str | None = None
    proof: WeightProof | None = None
    rebased: Rebase | None = None
    attempt: str
    environment: dict[str, str]
    environment_digest: str
    timings_s: Metrics = {}
    metrics: Metrics = {}
    notes: list[str] = []


class ShardPlan(Record):
    """One rollout shard: rows [start, stop) of the prompts shard, and how to sample them."""

    index: int
    start: int
    stop: int
    sampling: SamplingPolicy
    policy_version: int
    policy_digest: str
    seed: Int64


class Plan(Record):
    """What step `step` will do; put once, adopted by every controller, named by the commit.

    The highest revision counts. `redo` is part of every request of the step unless 0, so that what
    an earlier revision stored is made again. `configs` are the whole RunConfig as of this step, by
    its fields.
    """

    schema_version: int = RECORD_SCHEMA_VERSION
    run: str
    step: int
    revision: int = 0
    kind: Literal["genesis", "train", "skipped", "fork"]
    reason: str | None = None
    redo: int = 0
    previous: str
    prompts: RecordRef | None
    shards: list[ShardPlan]
    cursor: Cursor
    configs: dict[str, Any]


class ParentRef(Record):
    """The commit that a fork continues; `sha256` is over its stored bytes."""

    run: str
    step: int
    sha256: str


class Signature(Record):
    """Who vouches for a commit: ed25519 over its canonical bytes without this field; both hex."""

    algorithm: Literal["ed25519"] = "ed25519"
    public_key: str
    signature: str


class StepCommit(Record):
    """The one object that makes a step exist.

    `previous` is the sha256 of the previous commit's bytes (of run.json at the first step, which
    is 0, or for a fork the step of `parent`). `state_id` is the sha256 of the train record whose
    trainer state this step ends in.
    """

    schema_version: int = RECORD_SCHEMA_VERSION
    run: str
    step: int
    kind: Literal["genesis", "train", "skipped", "fork"]
    plan: ObjectRef
    records: list[RecordRef]
    policy_version: int
    policy_digest: str
    policy: PolicyRef
    state_id: str
    cursor: Cursor
    metrics: Metrics
    previous: str
    parent: ParentRef | None = None
    rebased: Rebase | None = None
    attempt: str
    committed_at: str
    signature: Signature | None = None


class RunRecord(Record):
    """Who the run is: put once, never deleted. `config` is the resolved RunConfig.

    `weights` are {file name: sha256} of the base model, so that genesis imports what was checked.
    """

    schema_version: int = RECORD_SCHEMA_VERSION
    run: str
    launch_id: str
    config: dict[str, Any]
    prompts: PromptInputs
    model: InputRef
    weights: dict[str, str]
    stop_token_ids: list[int]
    parent: ParentRef | None = None
    created_at: str


class EvalRecord(Record):
    """Held-out accuracy of one committed policy version; `low`, `high` bound the mean at 95%.

    The interval is over prompts (a prompt's completions are not independent).
    """

    schema_version: int = RECORD_SCHEMA_VERSION
    run: str
    suite: str
    policy_version: int
    policy_digest: str
    records: list[RecordRef]
    num_prompts: int
    num_samples: int
    num_graded: int
    accuracy: float | None
    low: float | None
    high: float | None
    reward_mean: float | None
    metrics: Metrics


class GivenUp(Record):
    """One object that `gc` deletes: what it was, and why nothing needs it.

    `policy` and `snapshot` files are named by commits, and retention gave them up; `unreferenced`
    objects are named by no commit, and nobody knows their digest.
    """

    key: str
    kind: Literal["policy", "snapshot", "unreferenced"]
    num_bytes: int
    sha256: str | None = None
    why: str


class GcRecord(Record):
    """What `gc` is about to delete below some steps: put before the first of it is deleted.

    An object named here may be gone or not; it is given up either way. `head` is the newest step
    when it was decided, `rule` the retention that decided it. `attempt` makes each its own, so that
    whoever put one may withdraw it before it deletes anything.
    """

    schema_version: int = RECORD_SCHEMA_VERSION
    run: str
    head: int
    rule: dict[str, Any]
    objects: list[GivenUp]
    attempt: str
    created_at: str


def request_digest(stage: str, body: Mapping[str, Any]) -> str:
    """Returns the digest of a request: sha256 over stage, schema version and `body`.

    `body` holds seeds, the resolved stage config, digests of input data, the policy digest and
    for train the state id; never keys, attempts, run name, code, host or library versions.
    """
    return sha256_hex(
        canonical_json({"stage": stage, "schema_version": RECORD_SCHEMA_VERSION, **body})
    )


def redo_field(redo: int) -> dict[str, int]:
    """Returns what a request's body holds of a plan's `redo`: nothing for 0, the usual case."""
    return {"redo": redo} if redo else {}


def input_digest(file_digests: Mapping[str, str]) -> str:
    """Returns the address of a set of files, from {file name: sha256}."""
    return sha256_hex(canonical_json(sorted(file_digests.items())))
