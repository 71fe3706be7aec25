"""Calls a stage where its placement says: in this process, in a child, or at a service.

The caller sees `Transient` or `Permanent` whatever the placement; retries belong to `task.py`.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self, TypeVar

import httpx

from storage.object_store import ObjectStore
from storage.records import Record
from tasks.child_process import ChildProcess, ChildSpec, launch
from tasks.errors import Permanent, Transient, attributed
from tasks.service_contract import STAGE_FAILED, Answer, ErrorBody, Health, RunCall
from tasks.workspace import Workspace

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)

_POLL_S = 0.1
_SAY_EVERY_S = 5.0


class StageClient(Protocol):
    """Runs requests of one stage."""

    warm: bool
    """Whether an engine stays between calls, so that loading ahead and keeping state help."""

    def run(self, request: Record, result_type: type[R]) -> R:
        """Returns the stage's result for `request`.

        Raises:
            Transient: the same request may succeed when tried again.
            Permanent: it would fail the same way.
        """
        ...


class InProcess:
    """Calls the stage in this process.

    Args:
        stage: the stage module.
        store: where its objects are.
        engine: what the stage's `run` takes as its engine; None for stages without one.
        workspace: where it may put local files.
    """

    warm = True

    def __init__(
        self, stage: Any, *, store: ObjectStore, engine: Any = None, workspace: Workspace
    ) -> None:
        self._stage = stage
        self._store = store
        self._engine = engine
        self._workspace = workspace

    def run(self, request: Record, result_type: type[R]) -> R:
        """Returns the stage's result; see `StageClient`."""
        try:
            result = self._stage.run(request, self._store, self._engine, workspace=self._workspace)
        except Exception as error:
            raise attributed(error, workspace=self._workspace) from error
        assert isinstance(result, result_type)
        return result


class Service:
    """Calls a stage at a running service.

    Args:
        url: its address.
        token: the bearer token.
        stall_s: a call that shows no sign of progress for so long is given up; None waits.
    """

    def __init__(self, url: str, token: str, *, stall_s: float | None = None) -> None:
        self._url = url
        # No limit on the whole answer: a step may take minutes. Its progress sends blank lines.
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            timeout=httpx.Timeout(stall_s, connect=10.0),
            trust_env=False,
        )

    def health(self, *, within_s: float | None = None) -> Health:
        """Returns how the service is; by default it may take as long as a call.

        Raises:
            Transient: it cannot be reached, or does not answer.
            Permanent: it does not know the token.
        """
        limit = httpx.USE_CLIENT_DEFAULT if within_s is None else within_s
        with self._broken_off():
            answer = self._http.get("/health", timeout=limit)
        return Health.from_bytes(self._accepted(answer).content)

    def run(self, request: Record, result_type: type[R]) -> R:
        """Returns the stage's result; see `StageClient`."""
        call = RunCall(type=type(request).__name__, request=request.model_dump(mode="json"))
        with self._broken_off():
            answer = self._http.post("/run", content=call.to_bytes())
        body = self._accepted(answer).content.strip()
        if not body:
            raise Transient(
                f"The service at {self._url} ended during the call. Expected an answer; the same "
                "request can be sent again."
            )
        ended = Answer.from_bytes(body)
        if ended.error:
            raise ended.error.to_error()
        return result_type.model_validate(ended.result)

    def close(self) -> None:
        """Closes the connection; the service goes on."""
        self._http.close()

    @contextlib.contextmanager
    def _broken_off(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise Transient(
                f"The service at {self._url} broke off: {type(error).__name__}: {error}. "
                "Expected an answer; the same request can be sent again."
            ) from error

    def _accepted(self, answer: httpx.Response) -> httpx.Response:
        if answer.status_code == STAGE_FAILED:
            raise ErrorBody.from_bytes(answer.content).to_error()
        where = f"{answer.request.url.path}: {answer.status_code} {answer.text}"
        if answer.is_server_error:
            raise Transient(
                f"The service at {self._url} broke off {where}. Expected an answer; the same "
                "request can be sent again."
            )
        if answer.is_error:
            raise Permanent(f"The service at {self._url} refused {where}")
        return answer


class Child:
    """A stage's service as a child of this process, ended with it however it ends.

    `start` returns at once; the first `run` waits until the engine is ready. A child that dies
    fails the call in which it died with `Transient`, and the next call starts another. After
    `close` none is started any more. Safe to use from several threads.

    Args:
        spec: what the child serves.
        workspace: where the files that we talk through lie.
        say: told every few seconds what the child is doing while a call waits for its engine.
    """

    warm = True

    def __init__(
        self,
        spec: ChildSpec,
        *,
        workspace: Workspace,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self._spec = spec
        self._say = say
        self._workspace = workspace
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self._service: Service | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The service's process, which is also its process group; None if none is there."""
        return self._process.pid if self._process else None

    @property
    def url(self) -> str | None:
        """Where the child listens; None if it does not yet."""
        address = self._process.address() if self._process else None
        return address[0] if address else None

    def is_alive(self) -> bool:
        """Tells whether its process is there, ready or not."""
        return self._process is not None and not self._process.is_dead()

    def health(self, *, within_s: float) -> Health:
        """Returns how the child is, within a time.

        Raises:
            Transient: it does not say, or is not ready for the first time.
        """
        service = self._service
        if service is None:
            raise Transient(f"The {self._spec.name} process is not ready.")
        return service.health(within_s=within_s)

    def kill(self) -> None:
        """Ends the process at once, whatever it is doing; the next call starts another."""
        with self._lock:
            process, service = self._forget()
        if service:
            service.close()
        if process:
            process.end(grace_s=0.0)

    def start(self) -> None:
        """Starts the process if none is alive, and returns while its engine still starts.

        Raises:
            Permanent: there is no such interpreter, or this child was closed.
        """
        self._started()

    def wait_ready(self, *, progress: Callable[[str], None] | None = None) -> None:
        """Waits until the engine is ready, starting it if need be.

        Args:
            progress: told every few seconds what the child is doing; default: `say`.

        Raises:
            Transient: the child was killed while it started, or the store was out of reach.
            Permanent: the engine refuses to start; the message has the cause and the log.
        """
        self._ready(progress or self._say)

    def run(self, request: Record, result_type: type[R]) -> R:
        """Returns the stage's result; see `StageClient`."""
        process, service = self._ready(self._say)
        try:
            return service.run(request, result_type)
        except Transient as error:
            # A broken connection is seen a moment before the process is gone.
            if process.is_dead(within_s=1.0):
                raise process.death() from error
            raise

    def close(self) -> None:
        """Ends the child and all that it started, for good. Safe to call twice."""
        with self._lock:
            self._closed = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            process, service = self._forget()
        if service:
            service.close()
            assert process is not None, "a service runs in a process"
            process.end()
        elif process:
            # It never became ready, so there is nothing that its engine could lose.
            process.end(grace_s=0.0)

    def _forget(self) -> tuple[ChildProcess | None, Service | None]:
        process, service = self._process, self._service
        self._process = self._service = None
        return process, service

    def _started(self) -> ChildProcess:
        with self._lock:
            if self._closed:
                raise Permanent(
                    f"The {self._spec.name} process was closed, so a call came after the end of "
                    "the run's session. Expected calls inside it: open another, which resumes."
                )
            if self._process and not self._process.is_dead():
                return self._process
            dead, service = self._forget()
            started = self._process = launch(self._spec, scratch=self._workspace.scratch)
        if service:
            service.close()
        if dead:
            logger.warning("%s: process %d had ended; started another", self._spec.name, dead.pid)
            dead.end()
        return started

    def _ready(self, say: Callable[[str], None]) -> tuple[ChildProcess, Service]:
        process = self._started()
        with self._lock:
            if self._service and self._process is process:
                return process, self._service
        address = self._wait_for_address(process, say)
        with contextlib.ExitStack() as undo:
            service = Service(*address)
            undo.callback(service.close)
            self._wait_until_ready(process, service, say)
            with self._lock:
                if self._process is not process:
                    raise Transient(f"The {self._spec.name} process was closed during a call.")
                self._service = self._service or service
                if self._service is service:
                    undo.pop_all()
                return process, self._service

    def _wait_for_address(
        self, process: ChildProcess, say: Callable[[str], None]
    ) -> tuple[str, str]:
        beat = _beat(self._spec.name, say)
        while not (address := process.address()):
            if process.is_dead():
                raise process.death()
            beat("starting Python")
        return address

    def _wait_until_ready(
        self, process: ChildProcess, service: Service, say: Callable[[str], None]
    ) -> None:
        beat = _beat(self._spec.name, say)
        while (health := self._health(process, service)).status != "ready":
            if health.error:
                self._end()
                raise process.with_log(health.error.to_error())
            beat(health.message)

    def _health(self, process: ChildProcess, service: Service) -> Health:
        try:
            return service.health()
        except Transient as error:
            if process.is_dead(within_s=1.0):
                raise process.death() from error
            raise


def _beat(name: str, say: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a function that sleeps a moment and at times passes on what is waited for."""
    began = said = time.monotonic()

    def beat(message: str) -> None:
        nonlocal said
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            say(f"{name}: {message} ({said - began:.0f} s)")
        time.sleep(_POLL_S)

    return beat
