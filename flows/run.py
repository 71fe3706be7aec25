"""Advances a run from its last commit, whoever asks: CLI, notebook, script or deployment."""

import logging
import time
from collections.abc import Sequence

from prefect import flow, tags
from prefect.runtime import flow_run

from flows.config import RunConfig
from flows.evaluate import evaluate
from flows.fork import fork_commit, fork_run
from flows.genesis import genesis
from flows.launch import launch, refuse_existing
from flows.opening import held, open_session, state_saved
from flows.phases import Phase, Wishes, phases
from flows.prefect_server import controller_settings, prefect_server, run_url
from flows.progress import Each, Lines, Watcher, watching
from flows.session import Session
from flows.show import RunSummary, known_evals, summarise
from flows.signing import find_signer, signing_note
from flows.step import step
from flows.stores import resolve_store
from infra.home import home
from storage.errors import LeaseHeld
from storage.leases import Lease
from storage.ledger import first_step, head, read_run
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig
from tasks.errors import Permanent
from tasks.workspace import open_workspace

log = logging.getLogger(__name__)


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
    wishes: Wishes | None = None,
    store: str | None = None,
    endpoint: str | None = None,
) -> RunSummary:
    """Continues a run from its last commit, redoing only what has no record.

    Args:
        run: its name.
        steps: how many more steps; default: up to the run's configured number.
        wishes: another config, what becomes of the open step, whether bits may be rebased.
        store: see `train_run`.
        endpoint: see `train_run`.

    Raises:
        NotFound: there is no such run.
        ValueError: the run has all its configured steps and `steps` says nothing of more, or the
            wishes do not fit the run; nothing was started.
        LeaseHeld: another controller advances it.
    """
    steps = _num_steps(steps)
    find_signer()
    store_config = resolve_store(store, endpoint)
    opened = open_store(store_config, writing=False)
    record, _ = read_run(opened, run)
    newest = head(opened, run)
    done = newest[0].step if newest else first_step(record)
    wishes = wishes or Wishes()
    # Refuses what does not fit before anything starts.
    config = phases(opened, record, wishes, last=done)[-1].config
    last = done + steps if steps else config.steps
    if last <= done and not steps and not evaluation_missing(opened, run, config, done):
        raise ValueError(
            f"Run {run!r} has all of its {config.steps} steps (the last commit is step {done}). "
            f"To go on, say how many more: `rollbook resume {run} --steps 10`."
        )
    return _advance_to(run, max(last, done), wishes=wishes, store_config=store_config)


def fork_and_train(
    target: str,
    *,
    run: str,
    steps: int | None = None,
    overrides: Sequence[str] = (),
    store: str | None = None,
    endpoint: str | None = None,
) -> RunSummary:
    """Makes a run that continues `RUN[@STEP]` under another name, and trains it for `steps`.

    Args:
        target: a committed step; without `@STEP` the newest.
        run: the new run's name.
        steps: RL steps; None makes only the run and its first commit, with no engine and no server.
        overrides: `key=value`, as for a launch.
        store: see `train_run`.
        endpoint: see `train_run`.

    Raises:
        NotFound: no such run or step, or its policy was given up.
        AlreadyExists: there is a run of that name.
        ValueError: the overrides do not fit.
    """
    steps = _num_steps(steps)
    store_config = resolve_store(store, endpoint)
    opened = open_store(store_config, writing=True)
    with open_workspace(home()) as workspace:
        fork_run(opened, target, run=run, overrides=overrides, workspace=workspace)
    commit, _ = fork_commit(opened, run)
    if steps:
        return _advance_to(run, commit.step + steps, store_config=store_config)
    return summarise(opened, run, store_config=store_config)


def evaluation_missing(store: ObjectStore, run: str, config: RunConfig, version: int) -> bool:
    """Whether a suite was not measured on that version, here or in a run that it came from."""
    found = {(record.policy_version, record.suite) for record in known_evals(store, run)}
    return any((version, suite) not in found for suite in config.evaluate.suites)


def _advance_to(
    run: str, last: int, *, wishes: Wishes | None = None, store_config: StoreConfig
) -> RunSummary:
    wishes = wishes or Wishes()
    with prefect_server():
        url = advance.with_options(flow_run_name=run)(
            run,
            until=last,
            store=store_config.uri,
            endpoint=store_config.endpoint,
            overrides=list(wishes.overrides),
            redo=wishes.redo,
            skip_step=wishes.skip_step,
            reason=wishes.reason,
            rebase=wishes.rebase,
        )
    opened = open_store(store_config, writing=False)
    return summarise(opened, run, store_config=store_config, ui_url=url)


@flow(name="run", persist_result=False)
def advance(  # noqa: PLR0913 - a flow run shows its parameters one by one
    run: str,
    until: int | None = None,
    store: str | None = None,
    endpoint: str | None = None,
    overrides: list[str] | None = None,
    redo: bool = False,
    skip_step: bool = False,
    reason: str | None = None,
    rebase: bool = False,
) -> str | None:
    """Takes `run` from its last commit to step `until` (default: its configured steps).

    This is what commands and notebooks run; `deployments.advance` is what a schedule does. A second
    call finds the commits and goes on after them.
    `overrides` to `rebase` are the fields of `Wishes`.

    Returns:
        Where the Prefect UI shows this flow run, or None without a lasting server.

    Raises:
        NotFound: there is no such run; launch it first.
        ValueError: the wishes do not fit the run.
        LeaseHeld: another controller advances it, or took it over meanwhile.
    """
    wishes = Wishes(overrides or [], redo, skip_step, reason, rebase)
    store_config = resolve_store(store, endpoint)
    opened = open_store(store_config, writing=True)
    record, _ = read_run(opened, run)
    newest = head(opened, run)
    last = until if until is not None else RunConfig.model_validate(record.config).steps
    first = (newest[0].step if newest else first_step(record)) + 1
    with (
        watching(run, first=first, last=last) as shown,
        controller_settings(),
        held(opened, run) as lease,
    ):
        watcher = Each(shown, Lines(log.info, last=last))
        # Planned under the lease: nobody else makes plans or commits meanwhile.
        planned = phases(opened, record, wishes, last=last)
        advance_phases(opened, store_config, run, planned, watcher=watcher, lease=lease)
    return run_url(flow_run.get_id())


def advance_phases(
    store: ObjectStore,
    store_config: StoreConfig,
    run: str,
    planned: Sequence[Phase],
    *,
    watcher: Watcher,
    lease: Lease,
) -> None:
    """Takes a run through its phases, under the lease; the last one evaluates what is due.

    Raises:
        LeaseHeld: another controller took the run over.
    """
    for phase in planned:
        with (
            open_session(store, store_config, run, watcher, phase) as session,
            state_saved(session, lease),
        ):
            evaluate_at = phase.until if phase is planned[-1] else None
            _advance_session(session, phase.until, last=evaluate_at, lease=lease)


def _advance_session(session: Session, until: int, *, last: int | None, lease: Lease) -> None:
    """Takes an open run to step `until`; evaluates what is due unless `last` is None.

    A phase that only finishes or skips an open step leaves that to the next, whose config may be
    the one under which the policy can be sampled from at all.
    """
    run, watcher = session.run.run, session.watcher
    _say_where(session)
    if session.head is None:
        stop_if_lost(lease)
        if session.run.parent is None:
            with tags(f"run:{run}", "step:0"):
                genesis(run)
        else:
            session.head = fork_commit(session.store, run)
    _evaluate_if_due(session, last)
    silent = 0
    while session.last_commit.step < until:
        stop_if_lost(lease)
        began = time.monotonic()
        _step(session)
        watcher.committed(session.last_commit, seconds=time.monotonic() - began)
        silent = _count_silent(session, silent)
        _evaluate_if_due(session, last)


def _step(session: Session) -> None:
    run, number = session.run.run, session.last_commit.step + 1
    try:
        with tags(f"run:{run}", f"step:{number}"):
            step(run, number)
    except Permanent:
        session.watcher.say(
            f"step {number} failed in a way that trying again repeats. Every commit is kept. When "
            f"what is said below is mended, `rollbook resume {run}` goes on; with --redo it does "
            "the step's work afresh (with --redo --set KEY=VALUE under another config), with "
            "--skip-step it passes the step over"
        )
        raise


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


def _evaluate_if_due(session: Session, last: int | None) -> None:
    if last is None:
        return
    version = session.last_commit.policy_version
    at = session.last_commit.step
    due = at % session.config.evaluate.every == 0 or at == last
    if not due or not evaluation_missing(session.store, session.run.run, session.config, version):
        return
    try:
        with tags(f"run:{session.run.run}", f"version:{version}"):
            evaluate(session.run.run, version)
    except Permanent as error:
        # Nothing is trained on it: steps that are still to come need not die of it.
        if at == last:
            raise
        session.watcher.say(
            f"version {version} was not evaluated, and training goes on: {error} (a resume tries "
            "again; --set evaluate... measures otherwise)"
        )


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
