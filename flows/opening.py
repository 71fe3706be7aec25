"""A run opened for advancing: its lease, its checked head, its stages, and what was not saved."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect.runtime import flow_run

from flows.changes import config_as_of, newest_plan
from flows.grading_progress import GradingProgress
from flows.launch import check_prompts
from flows.phases import Phase
from flows.placement import Site
from flows.prefect_server import run_url
from flows.progress import Watcher
from flows.reports import Reports
from flows.session import Session, Unsaved, registered
from flows.topologies import TOPOLOGIES
from infra.home import home
from storage.errors import StorageError
from storage.layout import StepScope, run_prefix
from storage.leases import Lease, hold
from storage.ledger import ancestors, commits, first_step, head, read_run, record_ref
from storage.object_store import ObjectStore
from storage.objects import is_there
from storage.opening import sweep
from storage.records import RecordRef, RunRecord, StepCommit
from storage.store_config import StoreConfig
from tasks.errors import Permanent, Transient
from tasks.train.contract import SnapshotRequest, SnapshotResult
from tasks.train.history import find_snapshot, stop_snapshot, train_record
from tasks.workspace import Workspace, open_workspace

NUM_CHECKED_COMMITS = 100
"""How far back the chain is checked before engines start; older commits cost a read each."""
SAVING_LIMIT_S = 120.0
"""How long the end waits for the trainer's state to be stored; a resume replays what is not."""
STOPPING_LIMIT_S = 12.0
"""Likewise where somebody ends the run: Prefect kills what it cancelled after 30 s."""


@contextmanager
def held(store: ObjectStore, run: str) -> Iterator[Lease]:
    """Holds the controller's lease; what uploads a dead controller left open are given up.

    The lease says which flow run holds it, and where the UI shows that.
    """
    flow_run_id = flow_run.get_id()
    holder = {"flow_run_id": flow_run_id, "flow_run_url": run_url(flow_run_id)}
    with hold(store, run, "controller", holder) as lease:
        sweep(store, run_prefix(run), older_than_s=0)
        yield lease


@contextmanager
def open_session(
    store: ObjectStore, store_config: StoreConfig, run: str, watcher: Watcher, phase: Phase
) -> Iterator[Session]:
    """Yields the run open for one phase: its stages start in the background, and end with it."""
    record, run_digest = read_run(store, run)
    newest = checked_head(store, run)
    with ExitStack() as stack:
        workspace: Workspace = stack.enter_context(open_workspace(home()))
        _check_reward(store, record, newest, phase, workspace=workspace)
        reports = Reports(
            store,
            record,
            workspace,
            run_flow_id=flow_run.get_id(),
            first=newest[0].step + 1 if newest else first_step(record) + 1,
            last=phase.until,
            store_config=store_config,
        )
        place = TOPOLOGIES[phase.config.topology]
        stages = stack.enter_context(
            place(
                Site(
                    record=record,
                    config=phase.config,
                    store=store,
                    store_config=store_config,
                    workspace=workspace,
                    say=watcher.say,
                    graded=GradingProgress([watcher.graded, reports.graded]),
                )
            )
        )
        stack.enter_context(reports)
        session = Session(
            store=store,
            run=record,
            run_digest=run_digest,
            config=phase.config,
            stages=stages,
            workspace=workspace,
            watcher=watcher,
            reports=reports,
            head=newest,
            supersede=phase.supersede,
            rebase=phase.rebase,
        )
        _look_back(session)
        yield stack.enter_context(registered(session))


def _check_reward(
    store: ObjectStore,
    record: RunRecord,
    newest: tuple[StepCommit, str] | None,
    phase: Phase,
    *,
    workspace: Workspace,
) -> None:
    """Checks every gold answer if the run is graded another way from here on.

    Raises:
        ValueError: rows cannot be graded; the message names some.
    """
    plan = newest_plan(store, record, newest[0] if newest else None)
    if plan is None:
        return
    before, after = config_as_of(record, plan).reward, phase.config.reward
    if before.request_fields() != after.request_fields():
        check_prompts(phase.config, record.prompts, store, workspace=workspace)


def checked_head(store: ObjectStore, run: str) -> tuple[StepCommit, str] | None:
    """Returns the newest commit and its digest after checking the last commits' chain.

    Raises:
        Corrupt: one of the last commits was changed or is gone; the message names it.
    """
    newest = head(store, run)
    start = max(newest[0].step + 1 - NUM_CHECKED_COMMITS, 0) if newest else 0
    for found in commits(store, run, start=start):
        newest = found
    return newest


def _look_back(session: Session) -> None:
    """Finds what the last trainer left: steps without a snapshot, its environment."""
    if session.head is None:
        return
    store, head_commit = session.store, session.last_commit
    unsaved = Unsaved()
    for commit, _ in ancestors(store, head_commit.run, head_commit.step):
        record = train_record(store, commit)
        if record is None:
            continue
        if session.environment is None:
            session.environment = record.environment
        if find_snapshot(store, commit, record) or unsaved.steps >= NUM_CHECKED_COMMITS:
            break
        unsaved.trained(record, seconds=commit.metrics.get("train_s") or 0.0)
    session.unsaved = unsaved
    session.stop_snapshot = snapshot_to_name(store, head_commit)


def snapshot_to_name(store: ObjectStore, commit: StepCommit) -> list[RecordRef]:
    """Returns the record that the next commit has to name: of a stop's snapshot, if it is whole.

    One with a lost file is named by nobody: replay brings the state back, and a commit that named
    it would never be closed.
    """
    made = stop_snapshot(store, commit)
    if made is None or made.snapshot is None:
        return []
    if not all(is_there(store, ref) for ref in made.snapshot.files.values()):
        return []
    scope = StepScope(run=commit.run, step=commit.step)
    return [record_ref(scope, made, store=store)]


@contextmanager
def state_saved(session: Session, lease: Lease) -> Iterator[None]:
    """Stores the trainer's state when the block ends or is interrupted: a resume replays nothing.

    After a failed stage there is nothing to rely on, and replay brings the state back.
    """
    try:
        yield
    except (Transient, Permanent, StorageError):
        raise
    except BaseException:
        _save_state(session, lease, limit_s=STOPPING_LIMIT_S)
        raise
    _save_state(session, lease, limit_s=SAVING_LIMIT_S)


def _save_state(session: Session, lease: Lease, *, limit_s: float) -> None:
    if lease.lost or session.head is None or not session.unsaved.steps:
        return
    if not session.stages.train.warm:
        return
    commit = session.last_commit
    if commit.kind in ("skipped", "fork"):
        return
    session.watcher.begin("saving the trainer's state, so that a resume replays nothing")
    request = SnapshotRequest(
        scope=StepScope(run=commit.run, step=commit.step),
        state_id=commit.state_id,
        ranks=session.config.train.ranks,
        zero_stage=session.config.train.zero_stage,
    )

    def save() -> None:
        try:
            session.stages.train.run(request, SnapshotResult)
        except (Transient, Permanent) as error:
            session.watcher.say(f"the trainer's state was not saved: {error}")

    # Its own thread, so that a second interrupt, or the limit, ends the wait and with it the run.
    saving = threading.Thread(target=save, name="save-state", daemon=True)
    saving.start()
    saving.join(limit_s)
