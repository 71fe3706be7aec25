"""The train stage: experience and a trainer state in; the next policy, its probe and record out."""

import logging
import random
import tempfile
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from storage import environment
from storage.experience import write_shard
from storage.layout import StepScope, attempt_key
from storage.ledger import find_record, put_record
from storage.object_store import ObjectStore
from storage.objects import offer_file, upload_file
from storage.policies import read_probe, write_policy
from storage.records import Metrics, ObjectRef, PolicyRef, Probe, Record, SnapshotRef, StageRecord
from storage.schemas import TRAIN
from tasks.train.admission import admit
from tasks.train.contract import (
    GenesisRequest,
    ReplayRequest,
    ReplayResult,
    SnapshotRequest,
    SnapshotResult,
    TrainConfig,
    TrainEngine,
    TrainRequest,
    TrainResult,
)
from tasks.train.experience import (
    figures,
    judge,
    make_updates,
    read_experience,
    train_table,
)
from tasks.train.history import Restored, hold_state
from tasks.train.replay import PACKAGES, described
from tasks.train.rerun import rerun
from tasks.workspace import Workspace, trim_cache

logger = logging.getLogger(__name__)

__all__ = ["PACKAGES", "REQUESTS", "STAGE", "admit", "find", "run"]

REQUESTS = {
    GenesisRequest: TrainResult,
    TrainRequest: TrainResult,
    SnapshotRequest: SnapshotResult,
    ReplayRequest: ReplayResult,
}

STAGE = "train"

_NUM_UPLOADS = 4


def run(
    request: GenesisRequest | TrainRequest | SnapshotRequest | ReplayRequest,
    store: ObjectStore,
    engine: TrainEngine,
    *,
    workspace: Workspace,
) -> TrainResult | SnapshotResult | ReplayResult:
    """Makes policy v + 1 (or imports policy 0), or returns what the request's record says.

    Writes train shard, policy, probe and, when due, a snapshot under a new attempt, then the
    record; a second call writes nothing. The engine keeps the new state if its record stands. A
    SnapshotRequest stores the held state and its record, a ReplayRequest writes nothing.

    Args:
        request: genesis, or one step's experience with the state that it continues; or a held
            state to be stored; or a committed step to be run again.
        store: where the experience lies and everything goes.
        engine: a trainer; it restores the state from the store if it holds another.
        workspace: policy and snapshot files are made in its scratch and linked into its cache.

    Raises:
        Permanent: loss or gradient not finite, a base model that cannot be imported, or a state
            that cannot be restored.
        Transient: a trainer rank died.
        Corrupt: an input is not what its reference names.
    """
    if isinstance(request, ReplayRequest):
        return rerun(request, store, engine, workspace=workspace)
    with tempfile.TemporaryDirectory(dir=workspace.scratch) as directory:
        attempt = uuid.uuid4().hex
        job = _Job(store, engine, workspace, request.scope, attempt, Path(directory))
        if isinstance(request, SnapshotRequest):
            return _snapshot(request, job)
        return _train(request, job)


def find(request: Record, store: ObjectStore) -> TrainResult | None:
    """Returns the result of a request whose record is there: no trainer is needed for it."""
    if not isinstance(request, GenesisRequest | TrainRequest):
        return None
    found = find_record(store, request.scope, stage=STAGE, request_digest=request.digest())
    return None if found is None else TrainResult(record=found, reused=True)


def _train(request: GenesisRequest | TrainRequest, job: "_Job") -> TrainResult:
    store, engine, attempt = job.store, job.engine, job.attempt
    found = find(request, store)
    if found is not None:
        return found
    logger.info("train of %s: attempt %s", request.scope.prefix, attempt)
    made = _genesis(request, job) if isinstance(request, GenesisRequest) else _step(request, job)
    record = _record(request, job, made)
    winner, ref = put_record(store, request.scope, record)
    if winner.attempt == attempt or _same_state(winner, record):
        engine.adopt(ref.sha256)
    trim_cache(job.workspace.cache)
    return TrainResult(record=winner, reused=winner.attempt != attempt)


@dataclass(frozen=True)
class _Job:
    """One attempt: where it reads, computes and writes."""

    store: ObjectStore
    engine: TrainEngine
    workspace: Workspace
    scope: StepScope
    attempt: str
    directory: Path
    timings_s: Metrics = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Where this attempt keeps a data object."""
        return attempt_key(self.scope, self.attempt, name)


@dataclass(frozen=True)
class _Made:
    """What an attempt has to record."""

    policy: PolicyRef
    state_digest: str | None
    snapshot: SnapshotRef | None
    outputs: dict[str, ObjectRef] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    restored: Restored = field(default_factory=Restored)


def _snapshot(request: SnapshotRequest, job: _Job) -> SnapshotResult:
    """Stores the state if the engine holds it and no snapshot of it is there."""
    digest = request.digest()
    found = find_record(job.store, request.scope, stage="snapshot", request_digest=digest)
    if found is not None or job.engine.state_id != request.state_id:
        return SnapshotResult(record=found)
    with _Lap(job, "save_snapshot"):
        state_digest = job.engine.save_snapshot(job.directory)
    with ThreadPoolExecutor(_NUM_UPLOADS) as pool, _Lap(job, "upload"):
        files = _upload_snapshot(job, pool, sorted(job.directory.iterdir()))
    ref = SnapshotRef(files=files, ranks=request.ranks, zero_stage=request.zero_stage)
    environment_now = described(job.engine)
    record = StageRecord(
        stage="snapshot",
        request=request.body(),
        request_digest=digest,
        outputs={},
        snapshot=ref,
        state_digest=state_digest,
        attempt=job.attempt,
        environment=environment_now,
        environment_digest=environment.digest(environment_now),
        timings_s=job.timings_s,
    )
    return SnapshotResult(record=put_record(job.store, request.scope, record)[0])


def _genesis(request: GenesisRequest, job: _Job) -> _Made:
    config, engine = request.config, job.engine
    engine.configure(config)
    with _Lap(job, "initialise"):
        engine.initialise(Path(request.model_dir))
    size, special = engine.vocabulary()
    token_ids = probe_token_ids(request.seed, config=config, vocabulary=size, special=special)
    with ThreadPoolExecutor(_NUM_UPLOADS) as pool:
        policy = _publish(job, pool, config, version=0, token_ids=token_ids)
        state_digest, snapshot = _state(job, pool, config, snapshot_due=True)
        return _Made(policy.result(), state_digest, snapshot, metrics={"updates": 0.0})


def _step(request: TrainRequest, job: _Job) -> _Made:
    config, engine, store = request.config, job.engine, job.store
    with _Lap(job, "restore"):
        restored = hold_state(
            store,
            engine,
            request.state_id,
            scope=request.scope,
            workspace=job.workspace,
            rebase=request.rebase,
            tolerance=config.rebase_tolerance,
        )
    engine.configure(config)
    with _Lap(job, "read"):
        experience = read_experience(store, samples=request.samples, rewards=request.rewards)
        judged = judge(experience, config)
    updates = make_updates(
        experience, judged.verdicts, config=config, update_index=request.update_index
    )
    metrics = {"updates": 0.0, **figures(experience, judged)}
    learner_logprobs: dict[str, list[float]] = {}
    with _Lap(job, "update"):
        if updates:
            told = engine.update(updates, temperature=request.temperature)
            learner_logprobs = told.learner_logprobs
            metrics |= told.metrics
    with ThreadPoolExecutor(_NUM_UPLOADS) as pool:
        policy = _next_policy(request, job, pool, changed=bool(updates))
        shard = pool.submit(
            _write_train_shard, job, train_table(experience, judged.verdicts, learner_logprobs)
        )
        # What was rebased cannot be replayed: its state is stored at once.
        due = request.snapshot_due or restored.rebased is not None
        state_digest, snapshot = _state(job, pool, config, snapshot_due=due)
        with _Lap(job, "upload"):
            return _Made(
                policy.result(),
                state_digest,
                snapshot,
                outputs={"train": shard.result()},
                metrics=metrics,
                restored=restored,
            )


def _next_policy(
    request: TrainRequest, job: _Job, pool: ThreadPoolExecutor, *, changed: bool
) -> "Future[PolicyRef]":
    version = request.policy.version + 1
    if changed:
        token_ids = read_probe(job.store, request.policy).token_ids
        return _publish(job, pool, request.config, version=version, token_ids=token_ids)
    same: Future[PolicyRef] = Future()
    same.set_result(request.policy.model_copy(update={"version": version}))
    return same


def _publish(
    job: _Job,
    pool: ThreadPoolExecutor,
    config: TrainConfig,
    *,
    version: int,
    token_ids: list[list[int]],
) -> "Future[PolicyRef]":
    """Writes the policy's files and uploads them while the probe is asked, and others go on."""
    directory = job.directory / "policy"
    directory.mkdir()
    with _Lap(job, "save_policy"):
        tied = job.engine.save_policy(directory, max_file_bytes=config.policy_file_bytes)
    told: Future[Probe] = Future()
    written = pool.submit(
        write_policy,
        job.store,
        directory,
        scope=job.scope,
        attempt=job.attempt,
        version=version,
        dtype=config.dtype,
        tied=tied,
        probe=told,
        cache=job.workspace.cache,
    )
    with _Lap(job, "probe"):
        try:
            told.set_result(job.engine.probe(token_ids))
        except BaseException as error:
            # Else the writer would wait for ever.
            told.set_exception(error)
            raise
    return written


def _state(
    job: _Job, pool: ThreadPoolExecutor, config: TrainConfig, *, snapshot_due: bool
) -> tuple[str | None, SnapshotRef | None]:
    """Returns the state digest where it is promised, and the snapshot if one is due."""
    if snapshot_due:
        directory = job.directory / "snapshot"
        directory.mkdir()
        with _Lap(job, "save_snapshot"):
            state_digest = job.engine.save_snapshot(directory)
            files = _upload_snapshot(job, pool, sorted(directory.iterdir()))
        return state_digest, SnapshotRef(
            files=files, ranks=config.ranks, zero_stage=config.zero_stage
        )
    if config.dtype != "float32":
        return None, None
    with _Lap(job, "state_digest"):
        return job.engine.state_digest(), None


def _upload_snapshot(
    job: _Job, pool: ThreadPoolExecutor, paths: Sequence[Path]
) -> dict[str, ObjectRef]:
    def upload(path: Path) -> ObjectRef:
        ref = upload_file(job.store, job.key(f"snapshot/{path.name}"), path)
        offer_file(job.workspace.cache, path, ref.sha256)
        return ref

    return dict(zip((path.name for path in paths), pool.map(upload, paths), strict=True))


def _write_train_shard(job: _Job, table: pa.Table) -> ObjectRef:
    return write_shard(job.store, table, schema=TRAIN, key=job.key("train.parquet"))


def probe_token_ids(
    seed: int, *, config: TrainConfig, vocabulary: int, special: Sequence[int]
) -> list[list[int]]:
    """Returns the probe's token ids: drawn from the vocabulary by the seed, no special ones.

    Raises:
        ValueError: the vocabulary has only special ids.
    """
    ordinary = [token for token in range(vocabulary) if token not in set(special)]
    if not ordinary:
        raise ValueError(
            f"All {vocabulary} ids of the vocabulary are special. Expected ordinary tokens to "
            "make a probe from."
        )
    draw = random.Random(f"probe {seed}")
    return [draw.choices(ordinary, k=config.probe_tokens) for _ in range(config.probe_rows)]


def _record(request: GenesisRequest | TrainRequest, job: _Job, made: _Made) -> StageRecord:
    environment_now = described(job.engine)
    return StageRecord(
        stage=STAGE,
        request=request.body(),
        request_digest=request.digest(),
        outputs=made.outputs,
        policy=made.policy,
        snapshot=made.snapshot,
        state_digest=made.state_digest,
        rebased=made.restored.rebased,
        attempt=job.attempt,
        environment=environment_now,
        environment_digest=environment.digest(environment_now),
        timings_s=job.timings_s,
        metrics=made.metrics,
        notes=made.restored.notes,
    )


def _same_state(winner: StageRecord, mine: StageRecord) -> bool:
    """Whether the winner's state is ours to the bit; without digests nobody can say so."""
    return winner.state_digest is not None and winner.state_digest == mine.state_digest


class _Lap:
    """Times one part of an attempt into its record."""

    def __init__(self, job: _Job, name: str) -> None:
        self._job = job
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._job.timings_s[self._name] = time.perf_counter() - self._started
