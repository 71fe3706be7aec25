"""A policy whose files retention gave up, made again on this host by replaying its train stage."""

from collections.abc import Callable

from flows.replay import open_engines
from storage.layout import StepScope, run_of_key, step_of_key
from storage.ledger import read_commit, read_record, read_run
from storage.object_store import ObjectStore
from storage.records import StepCommit
from storage.store_config import StoreConfig
from tasks.errors import Permanent
from tasks.train.contract import ReplayRequest, ReplayResult, TrainConfig
from tasks.workspace import Workspace


def bring_back(
    store: ObjectStore,
    commit: StepCommit,
    *,
    where: StoreConfig,
    workspace: Workspace,
    say: Callable[[str], None],
) -> None:
    """Replays the train stage that made the policy of `commit`; its files are then in the cache.

    Nothing is written to the store. A skipped step, or the first of a fork, has the policy of a
    step before it, which is the one that is replayed.

    Args:
        store: opened for reading.
        commit: whose policy is wanted.
        where: the address of the store, for the engine.
        workspace: where we talk with the engine; its cache is this host's.
        say: told what is waited for.

    Raises:
        Permanent: the replay gave other bits: this environment is not the recorded one.
        NotFound: what the replay needs is gone.
    """
    key = commit.policy.files[0].key
    scope = StepScope(run=run_of_key(key), step=step_of_key(key))
    made, _ = read_commit(store, scope.run, scope.step)
    record = read_record(store, next(ref for ref in made.records if ref.stage == "train"))
    config = TrainConfig.model_validate(record.request["config"])
    say(f"retention gave up the policy of step {scope.step} of {scope.run}: replaying it")
    run, _ = read_run(store, scope.run)
    with open_engines(run, store=where, workspace=workspace, say=say) as engines:
        child = engines.ready("train", config.model_dump(mode="json"))
        result = child.run(ReplayRequest(scope=scope), ReplayResult)
    if result.policy_digest != result.expected_policy_digest:
        changes = "; ".join(result.environment_changes) or "nothing that the record names"
        raise Permanent(
            f"Replaying step {scope.step} of run {scope.run} gave policy {result.policy_digest}. "
            f"Expected {result.expected_policy_digest}. What changed since: {changes}. Replay it "
            "where it was trained, or choose a step whose policy is kept (`rollbook gc "
            f"{scope.run}`)."
        )
