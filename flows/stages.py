"""One-stage flows for work pools: each starts its engine, serves one request, and ends.

Work pools host flow runs, not tasks. What they are asked lies in the store (see `per_step.py`).
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

import tasks.reward.stage as reward_module
from flows.changes import config_as_of, newest_plan
from flows.config import RunConfig
from flows.grading_progress import GradingProgress, showing_grading
from flows.known_environments import known_environment
from flows.limits import reward_here
from flows.model import base_model
from flows.per_step import ANSWER, REQUEST
from flows.placement import EngineStage, check_environment, child_spec
from flows.prefect_server import controller_settings
from flows.progress import Lines
from flows.stores import resolve_store
from flows.worker_process import begin
from infra.home import home
from storage.ledger import head, read_run
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import Record, RunRecord
from storage.store_config import StoreConfig
from tasks.client import Child, InProcess, StageClient
from tasks.errors import Permanent, Transient
from tasks.reward.grading import start as start_grading
from tasks.service_contract import Answer, ErrorBody, RunCall
from tasks.train.contract import GenesisRequest
from tasks.workspace import Workspace, open_workspace

log = logging.getLogger("flows.stages")
"""By name, because Prefect loads this file under another one, and `flows.*` reaches the UI."""


@flow(name="rollout-stage", persist_result=False)
def rollout_stage(
    run: str, request_key: str, store: str | None = None, endpoint: str | None = None
) -> None:
    """Samples one shard. Started by the step that needs it.

    Args:
        run: Name of the run.
        request_key: Where the request lies in the store.
        store: s3://bucket/prefix or a directory. Empty: the default store of the worker.
        endpoint: Address of an S3 server that is not AWS.

    Raises:
        Transient: another flow run of the same request may succeed.
        Permanent: it would fail the same way.
    """
    _serve_once("rollout", run, request_key, resolve_store(store, endpoint))


@flow(name="train-stage", persist_result=False)
def train_stage(
    run: str, request_key: str, store: str | None = None, endpoint: str | None = None
) -> None:
    """Trains one step, or imports the base model. Started by the step that needs it.

    Args:
        run: Name of the run.
        request_key: Where the request lies in the store.
        store: s3://bucket/prefix or a directory. Empty: the default store of the worker.
        endpoint: Address of an S3 server that is not AWS.

    Raises:
        Transient: another flow run of the same request may succeed.
        Permanent: it would fail the same way.
    """
    _serve_once("train", run, request_key, resolve_store(store, endpoint))


@flow(name="reward-stage", persist_result=False)
def reward_stage(
    run: str, request_key: str, store: str | None = None, endpoint: str | None = None
) -> None:
    """Grades one shard. Started by the step that needs it.

    Args:
        run: Name of the run.
        request_key: Where the request lies in the store.
        store: s3://bucket/prefix or a directory. Empty: the default store of the worker.
        endpoint: Address of an S3 server that is not AWS.

    Raises:
        Transient: another flow run of the same request may succeed.
        Permanent: it would fail the same way.
    """
    _serve_once("reward", run, request_key, resolve_store(store, endpoint))


@dataclass(frozen=True)
class _Asked:
    """One request as it lies in the store, and the run that it is of."""

    stage: str
    record: RunRecord
    config: RunConfig
    store: ObjectStore
    where: StoreConfig


def _serve_once(stage: str, run: str, request_key: str, where: StoreConfig) -> None:
    begin(run)
    opened = open_store(where, writing=True)
    answer_key = request_key.removesuffix(REQUEST) + ANSWER
    with controller_settings():
        try:
            result = _served(stage, run, request_key, opened, where)
        except (Transient, Permanent) as error:
            opened.put(answer_key, Answer(error=ErrorBody.of(error)).to_bytes())
            raise
        opened.put(answer_key, Answer(result=result.model_dump(mode="json")).to_bytes())


def _served(
    stage: str, run: str, request_key: str, store: ObjectStore, where: StoreConfig
) -> Record:
    module: Any = importlib.import_module(f"tasks.{stage}.stage")
    call = RunCall.from_bytes(store.get(request_key))
    known = {request.__name__: request for request in module.REQUESTS}
    if call.type not in known:
        raise Permanent(f"{stage} takes no {call.type!r}. Is the controller of another version?")
    request = known[call.type].model_validate(call.request)
    module.admit(request, store, run=run)
    record, _ = read_run(store, run)
    newest = head(store, run)
    plan = newest_plan(store, record, newest[0] if newest else None)
    asked = _Asked(stage, record, config_as_of(record, plan), store, where)
    result_type: type[Record] = module.REQUESTS[type(request)]
    with open_workspace(home()) as workspace, _client(asked, workspace) as client:
        if isinstance(request, GenesisRequest):
            # The base model as this host has it; genesis holds it against the recorded digests.
            model_dir = base_model(asked.config, watcher=Lines(log.info, last=0))
            request = request.model_copy(update={"model_dir": str(model_dir)})
        return client.run(request, result_type)


@contextmanager
def _client(asked: _Asked, workspace: Workspace) -> Iterator[StageClient]:
    """Yields the stage with its engine started and its environment accepted."""
    known = known_environment(asked.store, asked.record.run, asked.stage)
    if asked.stage == "reward":
        settings = reward_here(asked.config.reward).model_dump(mode="json")
        with (
            showing_grading(asked.record.run, flow_run.get_id()) as graded,
            start_grading(
                settings, model_dir=Path(), workspace=workspace, progress=GradingProgress([graded])
            ) as grading,
        ):
            _accept(asked, reward_module.describe(grading, asked.config.reward), known)
            yield InProcess(reward_module, store=asked.store, engine=grading, workspace=workspace)
        return
    stage: EngineStage = "rollout" if asked.stage == "rollout" else "train"
    spec = child_spec(stage, asked.record, asked.config, store=asked.where)
    with Child(spec, workspace=workspace, say=log.info) as child:
        child.wait_ready()
        _accept(asked, child.health(within_s=60.0).environment, known)
        yield child


def _accept(asked: _Asked, found: dict[str, str], known: dict[str, str]) -> None:
    """Refuses another environment than that of the run's last steps, unless it is allowed.

    Raises:
        Permanent: it is refused.
    """
    allow = asked.config.placement.allow_other_environment
    run = asked.record.run
    for line in check_environment(asked.stage, found, known, allow=allow, run=run):
        log.warning("another environment, recorded: %s", line)
