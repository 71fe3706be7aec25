"""Committed steps run again from the store alone, in engines that only read; nothing is written.

Which steps, and what the outcomes mean for a run, is for whoever verifies it to decide.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from infra.home import engines_python, home
from storage.errors import StorageError
from storage.layout import StepScope
from storage.ledger import ancestors, read_record
from storage.object_store import ObjectStore
from storage.records import RecordRef, RunRecord, StepCommit, canonical_json, why_invalid
from storage.store_config import StoreConfig
from tasks.client import Child, ChildSpec
from tasks.errors import Permanent, Transient
from tasks.rollout.contract import ReplayRequest as RolloutReplayRequest
from tasks.rollout.contract import ReplayResult as RolloutReplayResult
from tasks.rollout.contract import requested_config
from tasks.train.contract import ReplayRequest as TrainReplayRequest
from tasks.train.contract import ReplayResult as TrainReplayResult
from tasks.train.contract import TrainConfig
from tasks.workspace import Workspace

logger = logging.getLogger(__name__)

Outcome = Literal[
    "to the bit", "within tolerance", "not comparable", "not checked", "differs", "failed"
]

EngineName = Literal["rollout", "train"]

How = Literal["regenerated", "forced"]

NUM_TRIES = 3
"""How often a stage is asked whose process dies or whose store is out of reach."""


@dataclass(frozen=True)
class Replayed:
    """How one committed stage came out when it was run again.

    `failed`: it could not be run to its end, because something stored is gone or damaged, or
    because the engine refused the policy; `not checked` names a reason that proves nothing.
    """

    step: int
    stage: str
    outcome: Outcome
    detail: str
    environment_changes: list[str]
    seconds: float
    result: RolloutReplayResult | TrainReplayResult | None


class Engines:
    """One rollout and one train engine for a run's replays, as children that only read the store.

    Started when first asked for, and again where a record was made within other limits.

    Args:
        record: the run; its model is what the engines start with.
        store: where they read.
        workspace: where the files that we talk through lie.
        say: told what an engine is doing while a stage waits for it.
        python: interpreter of the engines' environment; default: this host's own. What the
            records name is not taken: the store may be anybody's.
    """

    def __init__(
        self,
        record: RunRecord,
        *,
        store: StoreConfig,
        workspace: Workspace,
        say: Callable[[str], None],
        python: str | None = None,
    ) -> None:
        self._record = record
        self._store = store
        self._workspace = workspace
        self.say = say
        self._python = python or engines_python()
        self._children: dict[str, tuple[bytes, Child]] = {}
        self._refused: dict[bytes, Permanent] = {}

    def begin(self, name: EngineName, config: dict[str, Any]) -> None:
        """Starts the engine with that config if it is not there, and returns at once.

        What keeps it from starting is told to whoever waits for it.
        """
        key = canonical_json([name, config])
        held, child = self._children.get(name, (b"", None))
        if held == key or key in self._refused:
            return
        if child is not None:
            child.close()
        child = Child(self._spec(name, config), workspace=self._workspace, say=self.say)
        self._children[name] = (key, child)
        try:
            child.start()
        except Permanent as error:
            self._refused[key] = error

    def ready(self, name: EngineName, config: dict[str, Any]) -> Child:
        """Returns the engine with that config, once it is ready.

        Raises:
            Permanent: it does not start; asked again, it is not tried again.
            Transient: it was killed as it started.
        """
        self.begin(name, config)
        key = canonical_json([name, config])
        if key in self._refused:
            raise self._refused[key]
        _, child = self._children[name]
        try:
            child.wait_ready()
        except Permanent as error:
            self._refused[key] = error
            raise
        return child

    def close(self) -> None:
        """Ends both engines. Safe to call twice."""
        for _, child in self._children.values():
            child.close()

    def _spec(self, name: str, config: dict[str, Any]) -> ChildSpec:
        return ChildSpec(
            name=name,
            stage=f"tasks.{name}.stage",
            engine=f"tasks.{name}.engine",
            config=config,
            model=self._record.model,
            store=self._store,
            home=home(),
            log_dir=home() / "logs" / self._record.run / "replay",
            python=self._python,
            writing=False,
        )


@contextmanager
def open_engines(
    record: RunRecord,
    *,
    store: StoreConfig,
    workspace: Workspace,
    say: Callable[[str], None] = logger.info,
    python: str | None = None,
) -> Iterator[Engines]:
    """Yields engines for the replays of a run; they end with the block. See `Engines`."""
    engines = Engines(record, store=store, workspace=workspace, say=say, python=python)
    try:
        yield engines
    finally:
        engines.close()


def replay_step(
    commit: StepCommit,
    *,
    store: ObjectStore,
    run: RunRecord,
    engines: Engines,
    how: How = "regenerated",
) -> list[Replayed]:
    """Runs the train stage and every rollout shard of a committed step again.

    Steps are cheapest in order: each engine then holds what the next step begins with. Train comes
    first, so that a policy whose files were given up is there if its replay has made them.

    Args:
        commit: the step. A skipped step and a fork's first commit have nothing to run again.
        store: opened for reading.
        run: the record of the commit's run.
        engines: of that run.
        how: whether shards are sampled again, or only teacher-forced.

    Returns:
        One outcome a stage, train first, then the shards in order.
    """
    if commit.kind not in ("genesis", "train"):
        return []
    refs = [ref for ref in commit.records if ref.stage == "train"]
    refs += sorted(rollout_refs(commit), key=lambda ref: (len(ref.stage), ref.stage))
    begun = time.monotonic()
    calls = [_prepared(ref, commit, store=store, run=run, how=how) for ref in refs]
    for call in calls:
        if isinstance(call, _Call):
            engines.begin(call.engine, call.config)
    outcomes: list[Replayed] = []
    for ref, call in zip(refs, calls, strict=True):
        found = call if isinstance(call, _Found) else _ask(call, engines)
        now = time.monotonic()
        outcomes.append(_outcome(commit.step, ref.stage, found, seconds=now - begun))
        begun = now
    return outcomes


def rollout_refs(commit: StepCommit) -> list[RecordRef]:
    """Returns the rollout records of a step."""
    return [ref for ref in commit.records if ref.stage.startswith("rollout-")]


@dataclass(frozen=True)
class _Call:
    """One stage to run again: its engine, and what to ask it."""

    engine: EngineName
    config: dict[str, Any]
    request: TrainReplayRequest | RolloutReplayRequest


@dataclass(frozen=True)
class _Found:
    """What came of it; without a result, why there is none."""

    outcome: Outcome
    detail: str
    result: TrainReplayResult | RolloutReplayResult | None = None


def _prepared(
    ref: RecordRef, commit: StepCommit, *, store: ObjectStore, run: RunRecord, how: How
) -> _Call | _Found:
    try:
        if ref.stage == "train":
            return _train_call(ref, commit, store=store)
        return _rollout_call(ref, commit, store=store, run=run, how=how)
    except StorageError as error:
        return _Found("failed", f"{type(error).__name__}: {error}")
    except ValueError as error:
        return _Found("not checked", f"this version has no such config: {why_invalid(error)}")


def _train_call(ref: RecordRef, commit: StepCommit, *, store: ObjectStore) -> _Call:
    config = TrainConfig.model_validate(read_record(store, ref).request["config"])
    # Under another environment the states before may be rebased, so that there is a figure to tell.
    request = TrainReplayRequest(scope=StepScope(run=commit.run, step=commit.step), rebase=True)
    return _Call("train", config.model_dump(mode="json"), request)


def _rollout_call(
    ref: RecordRef, commit: StepCommit, *, store: ObjectStore, run: RunRecord, how: How
) -> _Call:
    config = requested_config(read_record(store, ref).request)
    before, _ = next(ancestors(store, commit.run, commit.step - 1, expected=commit.previous))
    prompts = next(ref for ref in commit.records if ref.stage == "prompts")
    request = RolloutReplayRequest(
        scope=StepScope(run=commit.run, step=commit.step),
        record=ref,
        prompts=read_record(store, prompts).outputs["prompts"],
        policy=before.policy,
        model=run.model,
        how=how,
    )
    return _Call("rollout", config.model_dump(mode="json"), request)


def _ask(call: _Call, engines: Engines) -> _Found:
    for _ in range(NUM_TRIES - 1):
        try:
            return _ask_once(call, engines)
        except Transient as error:
            engines.say(f"{call.engine}: {error} Trying again.")
    try:
        return _ask_once(call, engines)
    except Transient as error:
        return _Found("failed", str(error))


def _ask_once(call: _Call, engines: Engines) -> _Found:
    try:
        child = engines.ready(call.engine, call.config)
    except Permanent as error:
        return _Found("not checked", f"the {call.engine} engine does not start here: {error}")
    try:
        result = _run(child, call.request)
    except Permanent as error:
        return _Found("failed", str(error))
    detail = result.detail if isinstance(result, RolloutReplayResult) else trained_detail(result)
    return _Found(result.outcome, detail, result)


def _run(
    child: Child, request: TrainReplayRequest | RolloutReplayRequest
) -> TrainReplayResult | RolloutReplayResult:
    if isinstance(request, RolloutReplayRequest):
        return child.run(request, RolloutReplayResult)
    return child.run(request, TrainReplayResult)


def trained_detail(result: TrainReplayResult) -> str:
    """Returns in words how a replayed train stage compares with its record."""
    pairs = {
        "policy": (result.expected_policy_digest, result.policy_digest),
        "state": (result.expected_state_digest, result.state_digest),
        "train shard": (result.expected_train_sha256, result.train_sha256),
    }
    asked = {name: pair for name, pair in pairs.items() if pair[0] is not None}
    other = [
        f"{name}: expected {expected}, found {found}"
        for name, (expected, found) in asked.items()
        if expected != found
    ]
    figures = ""
    if result.share is not None:
        figures = (
            f"weights differ by {result.share:.3g} of what the step changed them, by at most "
            f"{result.max_abs_diff:.3g}"
        )
    if result.outcome == "within tolerance":
        return figures
    return "; ".join([*other, *filter(None, [figures])]) or ", ".join(asked)


def _outcome(step: int, stage: str, found: _Found, *, seconds: float) -> Replayed:
    return Replayed(
        step=step,
        stage=stage,
        outcome=found.outcome,
        detail=found.detail,
        environment_changes=found.result.environment_changes if found.result else [],
        seconds=seconds,
        result=found.result,
    )
