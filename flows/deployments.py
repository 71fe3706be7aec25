"""The flows that `prefect.yaml` deploys on the `driver` pool: parameters are forms, states say why.

What a run's advance is stands in `run.py`; here is what only a flow run under Prefect needs: to be
launched by name, to be run again after a crash, to meet another controller.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import UUID

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Completed, Failed
from pydantic import Field

from flows.config import RunConfig
from flows.evaluate import evaluate as measure
from flows.gc import GcReport, plan_gc, retention_rule, run_gc
from flows.gc_report import lines, markdown_table
from flows.launch import launch
from flows.opening import held, open_session
from flows.outages import through_outages
from flows.phases import Wishes, phases
from flows.prefect_server import ANSWERS_WITHIN_S, controller_settings
from flows.progress import Lines
from flows.recipes import RECIPES, from_recipe
from flows.reports import artifact_key
from flows.restarts import (
    NONE_YET,
    Anchor,
    FlowRunMemory,
    Memory,
    anchored,
    cancelled_meanwhile,
    crashed_in_vain,
)
from flows.run import advance_phases, evaluation_missing
from flows.schedules import paused_words
from flows.signing import find_signer
from flows.stores import resolve_store, store_options
from flows.verify import verify
from flows.worker_check import check_worker
from flows.worker_process import begin
from infra.home import home
from storage.errors import AlreadyExists, LeaseHeld, NotFound
from storage.leases import Lease, look, peek
from storage.ledger import current_plan, first_step, head, read_run
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import RunRecord
from storage.store_config import StoreConfig
from tasks.workspace import open_workspace

__all__ = ["advance", "evaluate", "gc", "verify"]

log = logging.getLogger("flows.deployments")
"""By name, because Prefect loads this file under another one, and `flows.*` reaches the UI."""

Recipe = Annotated[str, Field(json_schema_extra={"enum": [*sorted(RECIPES)]})]
Steps = Annotated[int, Field(ge=1)]
Overlap = Literal["cancel new", "queue"]
LOOK_AGAIN_S = 2.0


@dataclass(frozen=True)
class _Asked:
    """What the form said about a run."""

    run: str
    recipe: str | None
    steps: int | None
    overlap: Overlap
    wishes: Wishes


@flow(name="advance", flow_run_name="advance {run}", persist_result=False)
def advance(  # noqa: PLR0913 - each is a field of the form
    run: str,
    recipe: Recipe | None = None,
    steps: Steps | None = None,
    overrides: list[str] = [],  # noqa: B006 - the form shows a list, nothing changes it
    overlap: Overlap = "cancel new",
    store: str | None = None,
    endpoint: str | None = None,
    redo: bool = False,
    skip_step: bool = False,
    reason: str | None = None,
    rebase: bool = False,
) -> State[None]:
    """Trains a run: launches it if there is none of that name, else goes on from its last commit.

    A flow run that died is run again and ends at the step where it would have ended.

    Args:
        run: Name of the run.
        recipe: Launches the run if it does not exist. One that exists goes on as it is.
        steps: How many steps this flow run adds. Empty: up to the run's configured number.
        overrides: Settings like train.learning_rate=1e-6, one a line. They hold from the next
            step on, or for the whole run if it is launched here.
        overlap: If another controller trains the run, end at once and say who, or wait for it.
        store: s3://bucket/prefix or a directory. Empty: the default store of the worker.
        endpoint: Address of an S3 server that is not AWS.
        redo: Do the open step again, with the overrides or all of it afresh.
        skip_step: Pass the open step over, with the same policy and its prompts consumed.
        reason: Why, for the record of redo or skip_step.
        rebase: Accept other bits of a replay, within tolerance.

    Returns:
        Completed, Cancelled (somebody else trains the run) or Failed (it kept crashing), with why.

    Raises:
        NotFound: there is no such run and no recipe was named.
        ValueError: what was asked does not fit the run.
    """
    asked = _Asked(run, recipe, steps, overlap, Wishes(overrides, redo, skip_step, reason, rebase))
    file = begin(run)
    with controller_settings(), get_client(sync_client=True) as client:
        if file is not None:
            log.info("output of this process: %s", file)
        flow_run_id = flow_run.get_id()
        assert flow_run_id is not None, "inside a flow"
        memory = FlowRunMemory(client, flow_run_id)
        find_signer()
        where = resolve_store(store, endpoint)
        opened = open_store(where, writing=True)
        if cancelled_meanwhile(memory.states()):
            return Cancelled(message="Cancelled while its process was gone. Retry goes on.")
        newest = _head_or_none(opened, run)
        stop = crashed_in_vain(memory, head_step=newest)
        if stop is not None:
            return Failed(message=stop)
        record = _launched(opened, asked)
        try:
            with _lease(opened, asked, flow_run_id=flow_run_id) as lease:
                said = through_outages(
                    lambda: _advance(opened, where, record, asked, memory=memory, lease=lease),
                    head_step=lambda: _head_once_prefect_answers(opened, run, flow_run_id),
                )
            return Completed(message=said + paused_words(client, run))
        except LeaseHeld as error:
            _leave_to_own_restart(opened, run, flow_run_id)
            return Cancelled(message=str(error))


def _head_or_none(store: ObjectStore, run: str) -> int:
    """Returns the newest committed step, or `NONE_YET`."""
    try:
        newest = head(store, run)
    except NotFound:
        return NONE_YET
    return newest[0].step if newest else NONE_YET


def _head_once_prefect_answers(store: ObjectStore, run: str, flow_run_id: str) -> int:
    """As `_head_or_none`.

    Raises:
        httpx.HTTPError: Prefect's server or its database is away.
    """
    ask_once: dict[Any, Any] = {PREFECT_CLIENT_MAX_RETRIES: 0}
    with (
        temporary_settings(ask_once),
        get_client(httpx_settings={"timeout": ANSWERS_WITHIN_S}, sync_client=True) as client,
    ):
        client.read_flow_run(UUID(flow_run_id))
    return _head_or_none(store, run)


def _launched(store: ObjectStore, asked: _Asked) -> RunRecord:
    """Returns the run, after launching it if it is not there."""
    try:
        return read_run(store, asked.run)[0]
    except NotFound as error:
        if asked.recipe is None:
            raise NotFound(
                f"There is no run {asked.run!r} in {store.uri}, and no recipe was named to launch "
                f"it. Correct the name, or choose a recipe: {', '.join(sorted(RECIPES))}."
            ) from error
    config = from_recipe(asked.recipe, asked.wishes.overrides)
    watcher = Lines(log.info, last=asked.steps or config.steps)
    try:
        with open_workspace(home()) as workspace:
            return launch(config, run=asked.run, store=store, workspace=workspace, watcher=watcher)
    except AlreadyExists:
        # Somebody else launched it meanwhile; whose lease it is shows next.
        return read_run(store, asked.run)[0]


@contextmanager
def _lease(store: ObjectStore, asked: _Asked, *, flow_run_id: str) -> Iterator[Lease]:
    """Holds the run's lease; waits for the present holder where that was asked for.

    An earlier process of this very flow run, believed dead while it lives, is always waited for.

    Raises:
        LeaseHeld: another controller lives, and `overlap` says to give way.
    """
    said = None
    with ExitStack() as stack:
        while True:
            try:
                lease = stack.enter_context(held(store, asked.run))
                break
            except LeaseHeld as error:
                holder = peek(store, asked.run, "controller")
                ours = holder is not None and holder.holder.get("flow_run_id") == flow_run_id
                if asked.overlap != "queue" and not ours:
                    raise
                token = holder.token if holder else None
                if token != said:
                    log.info("waiting: %s", error)
                    said = token
                time.sleep(LOOK_AGAIN_S)
        yield lease


def _advance(
    store: ObjectStore,
    where: StoreConfig,
    record: RunRecord,
    asked: _Asked,
    *,
    memory: Memory,
    lease: Lease,
) -> str:
    """Takes the run as far as this flow run is to take it, under the lease; says how far it is."""
    run, wishes = asked.run, asked.wishes
    newest = head(store, run)
    done = newest[0].step if newest else NONE_YET
    step = done + 1 if newest else first_step(record)
    plan = current_plan(store, run, step)
    revision = plan[0].revision if plan else NONE_YET
    last = max(done, 0) + asked.steps if asked.steps else _configured(record)
    anchor = anchored(memory, Anchor(until=last, open_step=step, revision=revision))
    wishes = anchor.left_of(wishes, open_step=step, revision=revision)
    planned = phases(store, record, wishes, last=max(anchor.until, done))
    config = planned[-1].config
    if done >= anchor.until and not evaluation_missing(store, run, config, done):
        return f"Run {run!r} is at step {done}: nothing was left to do."
    check_worker(store, run, config)
    watcher = Lines(log.info, last=anchor.until)
    advance_phases(store, where, run, planned, watcher=watcher, lease=lease)
    reached = head(store, run)
    assert reached is not None, "genesis is a commit"
    return f"Run {run!r} is at step {reached[0].step}, policy {reached[0].policy_digest[:16]}."


def _configured(record: RunRecord) -> int:
    return RunConfig.model_validate(record.config).steps


def _leave_to_own_restart(store: ObjectStore, run: str, flow_run_id: str) -> None:
    """Ends this process if the run is, or was, held by a later process of the same flow run.

    Prefect believed this one dead, so the state of the flow run is the later one's to say: any
    way out through Prefect would set it.
    """
    holder = look(store, run, "controller").holder
    if holder is None or holder.holder.get("flow_run_id") != flow_run_id:
        return
    log.warning(
        "process %d was believed dead and process %d on %s goes on with run %s; leaving it to that",
        os.getpid(),
        holder.pid,
        holder.host,
        run,
    )
    sys.stderr.flush()
    os._exit(0)


@flow(name="evaluate", flow_run_name="evaluate {run}", persist_result=False)
def evaluate(run: str, store: str | None = None, endpoint: str | None = None) -> State[None]:
    """Measures the newest committed policy of a run on its held-out prompts; trains nothing.

    Safe beside a controller, and to repeat: what was measured is not measured again.

    Args:
        run: Name of the run.
        store: s3://bucket/prefix or a directory. Empty: the default store of the worker.
        endpoint: Address of an S3 server that is not AWS.

    Raises:
        NotFound: there is no such run.
        ValueError: it has no commit yet.
    """
    begin(run)
    where = resolve_store(store, endpoint)
    opened = open_store(where, writing=True)
    record, _ = read_run(opened, run)
    newest = head(opened, run)
    if newest is None:
        raise ValueError(f"Run {run!r} has no commit yet. `advance` makes its first one.")
    commit = newest[0]
    phase = phases(opened, record, Wishes(), last=commit.step)[0]
    version = commit.policy_version
    if not evaluation_missing(opened, run, phase.config, version):
        return Completed(message=f"Version {version} of run {run!r} was measured already.")
    watcher = Lines(log.info, last=commit.step)
    with controller_settings(), open_session(opened, where, run, watcher, phase) as session:
        version = session.last_commit.policy_version
        measure.fn(run, version)
    return Completed(message=f"Version {version} of run {run!r} is measured.")


@flow(name="gc", flow_run_name="gc {run}", persist_result=False)
def gc(
    run: str,
    delete: bool = False,
    retention: list[str] = [],  # noqa: B006 - the form shows a list, nothing changes it
    store: str | None = None,
    endpoint: str | None = None,
) -> State[None]:
    """Says, or deletes, what nothing needs: policies and snapshots by the run's retention.

    Args:
        run: Name of the run.
        delete: Delete it. Without this the artifact only says what would go.
        retention: Settings for this call like retention.policies_every=50, one a line.
        store: s3://bucket/prefix or a directory. Empty: the default store of the worker.
        endpoint: Address of an S3 server that is not AWS.

    Raises:
        NotFound: no such run, or it has no commit.
        Corrupt: the run is damaged; `verify` says where.
        CommitConflict: a fork was made meanwhile; what it may need was not deleted.
    """
    begin(run)
    where = resolve_store(store, endpoint)
    opened = open_store(where, writing=delete)
    rule = retention_rule(opened, run, retention)
    with controller_settings():
        collect = run_gc if delete else plan_gc
        report = collect(opened, run, rule=rule, say=log.info)
    said = lines(report, store_options(where.uri, where.endpoint))
    create_markdown_artifact(
        key=artifact_key(run, "gc"),
        markdown=_gc_page(report, said),
        description=f"What retention of {run} keeps and gives up",
    )
    return Completed(message=f"{said[-1][:1].upper()}{said[-1][1:]}.")


def _gc_page(report: GcReport, said: list[str]) -> str:
    listed = "\n".join(f"- {line}" for line in said)
    return f"# gc of {report.run}\n\n{markdown_table(report)}\n\n{listed}\n"
