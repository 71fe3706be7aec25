"""Calls a stage in a flow run of its own on a work pool: nothing stays warm, nothing is held.

The request lies in the store beside what the stage will write, because flow parameters are small;
the answer lies beside it. The record of the stage is what counts: with one there is no flow run.
"""

import importlib
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType, WorkPool, WorkPoolStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from flows.config import PlacementConfig
from storage.errors import NotFound
from storage.layout import attempt_key
from storage.object_store import ObjectStore
from storage.records import Record, RunRecord
from storage.store_config import StoreConfig
from tasks.errors import Permanent, Transient
from tasks.service_contract import Answer, RunCall

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)

REQUEST, ANSWER = "request.json", "answer.json"
_POLL_S = 0.5
_SAY_AFTER_S = 15.0
_SAY_EVERY_S = 30.0


class PerStep:
    """A stage whose every call is a flow run of the deployment `<stage>-stage`."""

    warm = False

    def __init__(
        self,
        stage: str,
        record: RunRecord,
        *,
        store: ObjectStore,
        store_config: StoreConfig,
        placement: PlacementConfig,
        say: Callable[[str], None],
    ) -> None:
        self._stage = stage
        self._record = record
        self._store = store
        self._where = store_config
        self._placement = placement
        self._say = say
        self._module: Any = importlib.import_module(f"tasks.{stage}.stage")

    def run(self, request: Any, result_type: type[R]) -> R:
        """Returns the stage's result; see `tasks.client.StageClient`.

        Raises:
            Transient: the flow run crashed, was cancelled, or no worker took it in time.
            Permanent: the stage failed for good, or there is no such deployment.
        """
        found = self._module.find(request, self._store)
        if found is not None:
            return found
        with get_client(sync_client=True) as client:
            child = self._open_run(client, request) or self._start(client, request)
            try:
                self._wait(client, child)
            except BaseException:
                self._cancel(client, child)
                raise
            return self._result(client, child, result_type)

    def _open_run(self, client: SyncPrefectClient, request: Any) -> FlowRun | None:
        """Returns a flow run of this request that has not ended: a killed controller's."""
        runs = self._runs(client, request)
        return next((each for each in runs if each.state and not each.state.is_final()), None)

    def _runs(self, client: SyncPrefectClient, request: Any) -> list[FlowRun]:
        return client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"tags": {"all_": [_tag(request)]}}),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        )

    def _start(self, client: SyncPrefectClient, request: Any) -> FlowRun:
        attempt = len(self._runs(client, request)) + 1
        call = RunCall(type=type(request).__name__, request=request.model_dump(mode="json"))
        key = attempt_key(request.scope, uuid.uuid4().hex, REQUEST)
        self._store.put(key, call.to_bytes())
        name = f"{self._stage}-stage"
        what = getattr(request, "stage", self._stage)
        where = request.scope.prefix.rpartition("/")[2]
        try:
            # Returns at once: the limit is ours to watch, because a child is cancelled first.
            return run_deployment(  # type: ignore[return-value]
                f"{name}/{name}",
                parameters={
                    "run": self._record.run,
                    "request_key": key,
                    "store": self._where.uri,
                    "endpoint": self._where.endpoint,
                },
                flow_run_name=f"{what} of {self._record.run} {where}, attempt {attempt}",
                timeout=0,
                idempotency_key=f"{_tag(request)}-{attempt}",
                tags=[f"run:{self._record.run}", f"stage:{self._stage}", _tag(request)],
            )
        except ObjectNotFound as error:
            raise Permanent(
                f"There is no deployment {name!r}, and placement.{self._stage} is per-step. "
                "Expected it on the Prefect server: `prefect deploy --all` makes it."
            ) from error

    def _wait(self, client: SyncPrefectClient, child: FlowRun) -> None:
        """Waits until the flow run has ended; says what is wrong where nobody takes it."""
        began = time.monotonic()
        said = began + _SAY_AFTER_S - _SAY_EVERY_S
        started = False
        while True:
            state = client.read_flow_run(child.id).state
            if state is not None and state.is_final():
                return
            waited = time.monotonic() - began
            started = started or (state is not None and state.is_running())
            if not started and waited > self._placement.wait_s:
                raise Transient(f"{self._untaken(client, child)} It was cancelled.")
            if waited > self._placement.stage_timeout_s:
                raise Transient(
                    f"Flow run {child.name!r} took more than placement.stage_timeout_s "
                    f"({self._placement.stage_timeout_s:.0f} s) and was cancelled."
                )
            if not started and time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                self._say(self._untaken(client, child))
            time.sleep(_POLL_S)

    def _untaken(self, client: SyncPrefectClient, child: FlowRun) -> str:
        words = f"Flow run {child.name!r} waits for a worker"
        if child.work_pool_name is None:
            return f"{words}: its deployment has no work pool."
        return f"{words}: {pool_trouble(client, child.work_pool_name)}"

    def _cancel(self, client: SyncPrefectClient, child: FlowRun) -> None:
        """Ends the flow run before its controller goes on or ends."""
        try:
            state = client.read_flow_run(child.id).state
            if state is None or state.is_final():
                return
            client.set_flow_run_state(child.id, Cancelling(message="its step ended before it"))
        except Exception as error:
            # Whatever the server says, the error that brought us here is the one to tell.
            log.warning("flow run %s was not cancelled: %s", child.name, error)

    def _result(self, client: SyncPrefectClient, child: FlowRun, result_type: type[R]) -> R:
        ended = client.read_flow_run(child.id)
        key = str(ended.parameters["request_key"]).removesuffix(REQUEST) + ANSWER
        try:
            answer = Answer.from_bytes(self._store.get(key))
        except NotFound as error:
            state = ended.state
            how = f"{state.name}: {state.message}" if state else "without a state"
            kind = Transient if state and _may_be_tried_again(state.type) else Permanent
            raise kind(f"Flow run {ended.name!r} ended {how}") from error
        if answer.error:
            raise answer.error.to_error()
        return result_type.model_validate(answer.result)


def _may_be_tried_again(kind: StateType) -> bool:
    """Whether a flow run that left no answer was ended from outside."""
    return kind in (StateType.CRASHED, StateType.CANCELLED)


def _tag(request: Any) -> str:
    """What finds all flow runs of one request again."""
    return f"request:{request.digest()[:32]}"


def pool_trouble(client: SyncPrefectClient, name: str) -> str:
    """Returns in words why a work pool may not take a flow run, and what to do."""
    try:
        pool: WorkPool = client.read_work_pool(name)
    except ObjectNotFound:
        return f"there is no work pool {name!r}. Make it, then deploy again."
    if pool.is_paused:
        return f"work pool {name!r} is paused. Resume it: `prefect work-pool resume {name}`."
    if pool.status == WorkPoolStatus.NOT_READY:
        return (
            f"work pool {name!r} has no worker online. Start one: `prefect worker start --pool "
            f"{name}`."
        )
    return f"the workers of work pool {name!r} are busy, or its concurrency limit is reached."
