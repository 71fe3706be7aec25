"""A committed train stage run again: compared in all that it made, nothing written to the store."""

import math

from storage import environment
from storage.experience import encode_shard
from storage.ledger import ancestors, read_commit
from storage.object_store import ObjectStore
from storage.policies import open_policy
from storage.records import sha256_hex
from storage.schemas import TRAIN
from tasks.errors import Permanent
from tasks.train.contract import (
    Deviation,
    ReplayOutcome,
    ReplayRequest,
    ReplayResult,
    TrainConfig,
    TrainEngine,
)
from tasks.train.experience import train_table
from tasks.train.history import Restored, hold_state, train_record
from tasks.train.replay import (
    Committed,
    Retrained,
    described,
    open_kept,
    promises_bits,
    published_digest,
    retrain,
)
from tasks.workspace import Workspace


def rerun(
    request: ReplayRequest, store: ObjectStore, engine: TrainEngine, *, workspace: Workspace
) -> ReplayResult:
    """Returns how the train stage of a committed step comes out when it is run again.

    The state before it is restored as for a resume. Genesis is imported from its own policy, so
    that state and weights are held against each other, unless publishing rounded them. The engine
    keeps the state if it is the recorded one, so that the steps of a run can be asked in order at
    the price of one each.

    The policy's files are in this host's cache afterwards, if they came out to the bit.

    Raises:
        NotFound: the step is not committed, or its experience is gone.
        Permanent: it has no train stage, or the state before it cannot be restored.
        Corrupt: something stored is not what its reference names.
    """
    scope = request.scope
    commit, _ = read_commit(store, scope.run, scope.step)
    record = train_record(store, commit)
    if record is None:
        raise Permanent(
            f"Step {scope.step} of run {scope.run} is of kind {commit.kind!r} and has no train "
            "stage. Expected a step that trained. Nothing is to be replayed there."
        )
    committed = Committed(commit, record)
    if commit.kind == "genesis":
        retrained, restored = _import(store, engine, committed, workspace=workspace), Restored()
    else:
        before = record.request["state_id"]
        restored = hold_state(
            store,
            engine,
            before,
            scope=scope,
            workspace=workspace,
            rebase=request.rebase,
            # Steps before are judged when they are asked for themselves.
            tolerance=math.inf,
        )
        retrained = retrain(store, engine, committed)
    return _compared(request, store, engine, committed, retrained, restored, workspace=workspace)


def _import(
    store: ObjectStore, engine: TrainEngine, committed: Committed, *, workspace: Workspace
) -> None:
    engine.configure(TrainConfig.model_validate(committed.record.request["config"]))
    engine.initialise(open_policy(store, committed.policy, cache=workspace.cache))


def _compared(  # noqa: PLR0913 - both sides, and where to compare them
    request: ReplayRequest,
    store: ObjectStore,
    engine: TrainEngine,
    committed: Committed,
    retrained: Retrained | None,
    restored: Restored,
    *,
    workspace: Workspace,
) -> ReplayResult:
    record = committed.record
    changes = environment.changes(record.environment, described(engine))
    policy = published_digest(engine, committed, retrained, workspace=workspace)
    state = engine.state_digest() if record.state_digest else None
    asked = state, record.state_digest
    if state != record.state_digest and _is_rounded(committed):
        asked = None, None
    shard = _train_sha256(retrained) if retrained else None
    expected = record.outputs["train"].sha256 if retrained else None
    same = policy == committed.policy.digest and asked[0] == asked[1]
    deviation = None if same else _deviation(store, engine, committed, workspace=workspace)
    result = ReplayResult(
        outcome="to the bit",
        policy_digest=policy,
        expected_policy_digest=committed.policy.digest,
        state_digest=asked[0],
        expected_state_digest=asked[1],
        train_sha256=shard,
        expected_train_sha256=expected,
        environment_changes=changes,
        replayed=restored.replayed,
    )
    if same and shard == expected:
        # Equal weights are no proof of equal moments after a rebase; a state digest is.
        if state == record.state_digest and (state or restored.rebased is None):
            engine.adopt(committed.state_id)
        return result
    # A mean over nothing that changed has no share; JSON has no infinity either.
    figures = {} if deviation is None else _figures(deviation)
    # What began with a rebased state began with other moments than the recorded step.
    elsewhere = bool(changes) or restored.rebased is not None
    outcome = _outcome(
        deviation.share if deviation else None,
        tolerance=request.tolerance,
        promised=promises_bits(engine) and not elsewhere,
        elsewhere=elsewhere,
    )
    return result.model_copy(update={"outcome": outcome, **figures})


def _is_rounded(committed: Committed) -> bool:
    """Tells whether the masters may be others than an import of the published weights gives."""
    config = TrainConfig.model_validate(committed.record.request["config"])
    return committed.commit.kind == "genesis" and config.dtype != "float32"


def _outcome(
    share: float | None, *, tolerance: float, promised: bool, elsewhere: bool
) -> ReplayOutcome:
    """Returns what other bits mean; without a share, no weights were compared or none differ."""
    if promised:
        return "differs"
    if share is None:
        return "not comparable"
    if share <= tolerance:
        return "within tolerance"
    return "not comparable" if elsewhere else "differs"


def _figures(deviation: Deviation) -> dict[str, float | None]:
    return {
        "max_abs_diff": deviation.max_abs_diff,
        "mean_abs_diff": deviation.mean_abs_diff,
        "share": deviation.share if deviation.mean_abs_change else None,
    }


def _train_sha256(retrained: Retrained) -> str:
    table = train_table(retrained.experience, retrained.judged.verdicts, retrained.learner_logprobs)
    return sha256_hex(encode_shard(table, schema=TRAIN))


def _deviation(
    store: ObjectStore, engine: TrainEngine, committed: Committed, *, workspace: Workspace
) -> Deviation | None:
    """Compares element by element where retention left the files to compare with."""
    commit = committed.commit
    history = ancestors(store, commit.run, commit.step)
    policies = [found.policy for found, _ in (next(history), next(history, (commit, "")))]
    published, before = [open_kept(store, policy, workspace) for policy in policies]
    return None if published is None or before is None else engine.compare(published, before)
