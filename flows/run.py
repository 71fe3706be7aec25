"""Advances a run from its last commit, whoever asks: CLI, notebook, script or deployment."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect import flow
from prefect.runtime import flow_run

from flows.config import RunConfig
from flows.evaluate import evaluate
from flows.genesis import genesis
from flows.launch import launch, refuse_existing
from flows.prefect_server import controller_settings, prefect_server, run_url
from flows.progress import Watcher, watching
from flows.reports import Reports
from flows.session import Session, registered
from flows.show import RunSummary, summarise
from flows.signing import find_signer, signing_note
from flows.step import step
from flows.stores import resolve_store
from flows.topologies import TOPOLOGIES
from infra.home import home
from storage.errors import LeaseHeld
from storage.layout import run_prefix
from storage.leases import Lease, hold
from storage.ledger import commits, head, read_evals, read_run
from storage.object_store import ObjectStore
from storage.opening import open_store, sweep
from storage.records import StepCommit
from storage.store_config import StoreConfig
from tasks.workspace import Workspace, open_workspace

log = logging.getLogger(__name__)

NUM_CHECKED_COMMITS = 100
"""How far back the chain is checked before engines start; older commits cost a read each."""


def train_run(
    config: RunConfig,
    *,
    run: str | None = None,
    steps: int | None = None,
    store: str | None = None,
    endpoint: str | None = None,
) -> RunSummary:
    """Launches a run and trains it; works in scripts and in Jupyter, with progress.

    Args:
        config: what to do; a recipe returns one.
        run: its name; default `<recipe>-<n>`.
        steps: RL steps; default `config.steps`.
        store: `s3://bucket/prefix` or a directory; default `ROLLBOOK_STORE`, else the local server.
        endpoint: address of an S3 server that is not AWS.

    Returns:
        The run as of its last commit.

    Raises:
        AlreadyExists: the run is there; use `resume_run`.
        ValueError: the config, model, data or store cannot work; nothing was started.
        Permanent, Transient: a stage failed; everything committed is kept, `resume_run` goes on.
    """
    wanted = _num_steps(steps) or config.steps
    store_config = resolve_store(store, endpoint)
    find_signer()
    opened = open_store(store_config, writing=True)
    if run:
        refuse_existing(opened, run)
    with (
        watching(run or config.recipe, first=1, last=wanted) as watcher,
        open_workspace(home()) as workspace,
    ):
        name = launch(config, run=run, store=opened, workspace=workspace, watcher=watcher).run
    return _advance_to(name, wanted, store_config=store_config)


def _num_steps(steps: int | None) -> int | None:
    if steps is not None and steps < 1:
        raise ValueError(f"steps is {steps}. Expected 1 or more, or None for the run's own number.")
    return steps


def resume_run(
    run: str,
    *,
    steps: int | None = None,
    store: str | None = None,
    endpoint: str | None = None,
) -> RunSummary:
    """Continues a run from its last commit, redoing only what has no record.

    Args:
        run: its name.
        steps: how many more steps; default: up to the run's configured number.
        store: see `train_run`.
        endpoint: see `train_run`.

    Raises:
        NotFound: there is no such run.
        ValueError: the run has all its configured steps and `steps` says nothing of more.
        LeaseHeld: another controller advances it.
    """
    steps = _num_steps(steps)
    find_signer()
    store_config = resolve_store(store, endpoint)
    opened = open_store(store_config, writing=False)
    record, _ = read_run(opened, run)
    config = RunConfig.model_validate(record.config)
    newest = head(opened, run)
    done = newest[0].step if newest else 0
    last = done + steps if steps else config.steps
    if last <= done and not steps and not _evaluation_missing(opened, run, config, done):
        raise ValueError(
            f"Run {run!r} has all of its {config.steps} steps (the last commit is step {done}). "
            f"To go on, say how many more: `rollbook resume {run} --steps 10`."
        )
    return _advance_to(run, max(last, done), store_config=store_config)


def _evaluation_missing(store: ObjectStore, run: str, config: RunConfig, version: int) -> bool:
    found = {(record.policy_version, record.suite) for record in read_evals(store, run)}
    return any((version, suite) not in found for suite in config.evaluate.suites)


def _advance_to(run: str, last: int, *, store_config: StoreConfig) -> RunSummary:
    with prefect_server():
        url = advance.with_options(flow_run_name=run)(
            run, until=last, store=store_config.uri, endpoint=store_config.endpoint
        )
    opened = open_store(store_config, writing=False)
    return summarise(opened, run, store_config=store_config, ui_url=url)


@flow(name="run", persist_result=False)
def advance(
    run: str, until: int | None = None, store: str | None = None, endpoint: str | None = None
) -> str | None:
    """Takes `run` from its last commit to step `until` (default: its configured steps).

    This is what a deployment schedules. A second call finds the commits and goes on after them.

    Returns:
        Where the Prefect UI shows this flow run, or None without a lasting server.

    Raises:
        NotFound: there is no such run; launch it first.
        LeaseHeld: another controller advances it, or took it over meanwhile.
    """
    store_config = resolve_store(store, endpoint)
    opened = open_store(store_config, writing=True)
    record, _ = read_run(opened, run)
    config = RunConfig.model_validate(record.config)
    newest = head(opened, run)
    last = until if until is not None else config.steps
    first = newest[0].step + 1 if newest else 1
    with (
        watching(run, first=first, last=last) as watcher,
        controller_settings(),
        _held(opened, run) as lease,
        _open_session(opened, store_config, run, watcher, last) as session,
    ):
        _advance_session(session, last, lease=lease)
    return run_url(flow_run.get_id())


@contextmanager
def _held(store: ObjectStore, run: str) -> Iterator[Lease]:
    """Holds the controller's lease; what uploads a dead controller left open are given up."""
    with hold(store, run, "controller") as lease:
        sweep(store, run_prefix(run), older_than_s=0)
        yield lease


@contextmanager
def _open_session(
    store: ObjectStore, store_config: StoreConfig, run: str, watcher: Watcher, last: int
) -> Iterator[Session]:
    record, run_digest = read_run(store, run)
    config = RunConfig.model_validate(record.config)
    newest = checked_head(store, run)
    with ExitStack() as stack:
        workspace: Workspace = stack.enter_context(open_workspace(home()))
        place = TOPOLOGIES[config.topology]
        stages = stack.enter_context(
            place(
                record,
                config=config,
                store=store,
                store_config=store_config,
                workspace=workspace,
                say=watcher.say,
            )
        )
        reports = Reports(
            store,
            record,
            workspace,
            run_flow_id=flow_run.get_id(),
            first=newest[0].step + 1 if newest else 1,
            last=last,
        )
        stack.enter_context(reports)
        session = Session(
            store=store,
            run=record,
            run_digest=run_digest,
            config=config,
            stages=stages,
            workspace=workspace,
            watcher=watcher,
            reports=reports,
            head=newest,
        )
        yield stack.enter_context(registered(session))


def checked_head(store: ObjectStore, run: str) -> tuple[StepCommit, str] | None:
    """Returns the newest commit and its digest after checking the last commits' chain.

    Raises:
        Corrupt: one of the last commits was changed or is gone; the message names it.
    """
    newest = head(store, run)
    first = max(newest[0].step + 1 - NUM_CHECKED_COMMITS, 0) if newest else 0
    for found in commits(store, run, start=first):
        newest = found
    return newest


def _advance_session(session: Session, last: int, *, lease: Lease) -> None:
    run, watcher = session.run.run, session.watcher
    _say_where(session)
    if session.head is None:
        stop_if_lost(lease)
        genesis(run)
    _evaluate_if_due(session, last)
    silent = 0
    while session.last_commit.step < last:
        stop_if_lost(lease)
        began = time.monotonic()
        step(run, session.last_commit.step + 1)
        watcher.committed(session.last_commit, seconds=time.monotonic() - began)
        silent = _count_silent(session, silent)
        _evaluate_if_due(session, last)


def stop_if_lost(lease: Lease) -> None:
    """Lets a controller that was paused past its lease end before it spends more time.

    Raises:
        LeaseHeld: another controller holds the lease.
    """
    if lease.lost:
        run = lease.state.run
        raise LeaseHeld(
            f"Another controller took run {run!r} over while this one (process "
            f"{lease.state.pid}) was paused or cut off from the store. Expected to hold the lease "
            "before every step. Nothing is lost: the other one continues from the last commit; "
            f"once it has ended, `rollbook resume {run}` goes on."
        )


def _say_where(session: Session) -> None:
    session.watcher.say(f"run {session.run.run} in {session.store.uri}")
    url = run_url(flow_run.get_id())
    if url:
        session.watcher.say(f"watch it: {url}")
    note = signing_note(find_signer(), session.head[0] if session.head else None)
    if note:
        session.watcher.say(note)


def _evaluate_if_due(session: Session, last: int) -> None:
    version = session.last_commit.policy_version
    at = session.last_commit.step
    due = at % session.config.evaluate.every == 0 or at == last
    if due and _evaluation_missing(session.store, session.run.run, session.config, version):
        evaluate(session.run.run, version)


def _count_silent(session: Session, silent: int) -> int:
    """Returns how many steps in a row taught nothing because every completion was cut off.

    Raises:
        ValueError: too many did.
    """
    metrics = session.last_commit.metrics
    if metrics.get("truncated_share") != 1.0 or metrics.get("zero_std_share") != 1.0:
        return 0
    if silent + 1 < session.config.max_silent_steps:
        return silent + 1
    raise ValueError(
        f"Stopped after step {session.last_commit.step}: in {silent + 1} steps in a row every "
        f"completion hit rollout.max_tokens ({session.config.rollout.max_tokens}) and all rewards "
        "of every group were equal, so nothing can be learnt. Raise rollout.max_tokens, or check "
        "that the prompts ask for an answer that fits. All commits are kept."
    )
