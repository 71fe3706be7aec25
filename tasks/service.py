"""Serves one stage with its warm engine over HTTP: `python -m tasks.service --spec FILE.json`.

Which stage is the spec's business; nothing about a particular stage or engine belongs here.
"""

import argparse
import asyncio
import contextlib
import hmac
import importlib
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any, Protocol

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from storage import environment
from storage.inputs import open_input
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import Record
from tasks.errors import Permanent, Transient, attributed
from tasks.processes import kill_rest_of_own_group
from tasks.service_contract import (
    MAX_REQUEST_BYTES,
    STAGE_FAILED,
    Answer,
    ErrorBody,
    Health,
    RunCall,
    ServiceSpec,
)
from tasks.service_metrics import MEDIA_TYPE, ServiceMetrics
from tasks.workspace import Workspace, open_workspace

logger = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 5.0
_PARENT_POLL_S = 0.5
_BEAT_S = 1.0
_MAX_TEMPORARY_BYTES = 68
"""A socket there is named by 37 bytes more, of the 107 that the kernel takes."""


class Engine(Protocol):
    """What a service asks of every engine."""

    def close(self) -> None:
        """Ends whatever the engine started."""
        ...

    def progress(self) -> int:
        """Returns a number that grows while the engine works. Called from another thread."""
        ...

    def serves(self) -> tuple[int, str] | None:
        """Returns version and digest of the policy that it serves. Called from another thread."""
        ...


class StageModule(Protocol):
    """What a service asks of every stage module."""

    REQUESTS: Mapping[type[Record], type[Record]]
    """What it takes, and what each gives."""
    PACKAGES: tuple[str, ...]

    def run(self, request: Any, store: ObjectStore, engine: Any, *, workspace: Workspace) -> Record:
        """Does the stage's work, or returns what its record says."""
        ...

    def admit(self, request: Any, store: ObjectStore, *, run: str) -> None:
        """Raises `Permanent` unless the store bears out that `run` asks for this."""
        ...


class Served:
    """One stage and its engine, on one thread: the engine starts there and every call runs there.

    One thread, because engines hold thread-bound state (OpenMP pools, a parent-death signal in
    their ranks), and because one engine does one thing at a time.
    """

    def __init__(self, spec: ServiceSpec, workspace: Workspace) -> None:
        self._spec = spec
        self._workspace = workspace
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._lock = threading.Lock()
        self._in_flight: dict[str, Future[Record]] = {}
        self._stage: StageModule | None = None
        self._store: ObjectStore | None = None
        self._engine: Engine | None = None
        self._num_calls = 0
        self._busy_since: float | None = None
        self._tokens_per_s: float | None = None
        self._health = Health(status="starting", message="starting")
        self.metrics = ServiceMetrics(self.health)

    def start(self) -> None:
        """Begins to start the engine and returns at once; `health` tells how it goes."""
        self._thread.submit(self._start)

    def health(self) -> Health:
        """Returns how the service is right now."""
        engine, since = self._engine, self._busy_since
        serves = engine.serves() if engine else None
        return self._health.model_copy(
            update={
                "policy_version": serves[0] if serves else None,
                "policy_digest": serves[1] if serves else None,
                "num_calls": self._num_calls,
                "queue": max(len(self._in_flight) - 1, 0),
                "busy_s": time.monotonic() - since if since is not None else None,
                "progress": self.progress(),
                "tokens_per_s": self._tokens_per_s,
            }
        )

    def progress(self) -> int:
        """Returns a number that grows while anything is done."""
        return self._num_calls + (self._engine.progress() if self._engine else 0)

    def parse(self, call: RunCall) -> Record:
        """Returns the request in `call`, if the stage takes it and the store bears it out.

        Raises:
            Transient: the engine is not ready.
            Permanent: the stage has no such request, it does not validate, or no run asks for it.
        """
        request = self._parsed(call)
        if self._spec.run is not None:
            assert self._stage is not None
            assert self._store is not None
            try:
                self._stage.admit(request, self._store, run=self._spec.run)
            except Exception as error:
                raise attributed(error) from error
        return request

    def submit(self, request: Record) -> "Future[Record]":
        """Queues a request; identical ones share one future while it is in flight.

        Identical means the whole request, keys included: two runs may ask for the same work, but
        each wants its own record. The second of them finds the first one's or does it again.

        Raises:
            Transient: the service is ending.
        """
        with self._lock:
            digest = f"{type(request).__name__}:{request.content_digest()}"
            running = self._in_flight.get(digest)
            if running is None:
                if self._health.status != "ready":
                    raise Transient(f"The service takes no calls: {self._health.message}")
                running = self._thread.submit(self.metrics.counted, self._run, request)
                self._in_flight[digest] = running
                running.add_done_callback(lambda _: self._forget(digest))
            return running

    def drain(self) -> None:
        """Takes no more calls, and gives those in flight the time that the spec says."""
        with self._lock:
            self._health = Health(status="ending", message="it was told to end")
            in_flight = list(self._in_flight.values())
        wait(in_flight, timeout=self._spec.drain_s)

    def close(self) -> None:
        """Closes the engine; gives up after a few seconds, because the group is killed next."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._engine is not None:
            closing = threading.Thread(target=self._engine.close, daemon=True)
            closing.start()
            closing.join(_CLOSE_LIMIT_S)

    def _forget(self, digest: str) -> None:
        with self._lock:
            self._in_flight.pop(digest, None)

    def _start(self) -> None:
        try:
            self._start_engine()
        except Exception as error:
            logger.exception("%s did not start", self._spec.engine)
            body = ErrorBody.of(attributed(error, workspace=self._workspace))
            self._health = Health(status="failed", message=body.message, error=body)
        else:
            assert self._stage is not None
            self._health = Health(
                status="ready",
                message=f"{self._spec.engine} is ready",
                environment=environment.describe(self._stage.PACKAGES),
            )

    def _start_engine(self) -> None:
        self._say("importing")
        self._stage = importlib.import_module(self._spec.stage)  # type: ignore[assignment]
        engine_module = importlib.import_module(self._spec.engine)
        self._say(f"opening {self._spec.store.uri}")
        self._store = open_store(self._spec.store, writing=self._spec.writing)
        self._say("fetching the model's files")
        model_dir = open_input(self._store, self._spec.model, cache=self._workspace.cache)
        self._say("starting the engine")
        self._engine = engine_module.start(
            self._spec.config, model_dir=model_dir, workspace=self._workspace
        )

    def _say(self, message: str) -> None:
        logger.info("%s", message)
        self._health = Health(status="starting", message=message)

    def _parsed(self, call: RunCall) -> Record:
        if self._health.status != "ready" or self._stage is None:
            raise Transient(f"The service is not ready: {self._health.message}")
        known = {request.__name__: request for request in self._stage.REQUESTS}
        if call.type not in known:
            raise Permanent(
                f"{self._spec.stage} takes no {call.type!r}. Expected one of {sorted(known)}: "
                "is the service of another stage or version?"
            )
        try:
            return known[call.type].model_validate(call.request)
        except ValueError as error:
            raise attributed(error) from error

    def _run(self, request: Record) -> Record:
        assert self._stage is not None
        assert self._store is not None
        self._busy_since = time.monotonic()
        try:
            result = self._stage.run(request, self._store, self._engine, workspace=self._workspace)
        except Exception as error:
            logger.exception("%s failed", type(request).__name__)
            raise attributed(error, workspace=self._workspace) from error
        else:
            self._tokens_per_s = _tokens_per_s(result) or self._tokens_per_s
            return result
        finally:
            self._num_calls += 1
            self._busy_since = None


def _tokens_per_s(result: Record) -> float | None:
    """Returns what the record of a stage's result says of its speed, if it does."""
    record = getattr(result, "record", None)
    return record.metrics.get("completion_tokens_per_s") if record is not None else None


def make_app(served: Served, token: str) -> FastAPI:
    """Returns the HTTP face of `served`: `/health`, `/metrics` and `/run`, all behind `token`.

    Prometheus sends a bearer token too (`authorization: {credentials_file: ...}`), and what a
    service says of itself is nobody else's business: a run's speed, a model's version.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def check_token(authorization: Annotated[str, Header()] = "") -> None:
        if not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            served.metrics.refused("token")
            raise HTTPException(401, "Wrong or missing bearer token.")

    @app.get("/health", dependencies=[Depends(check_token)])
    def health() -> Health:
        return served.health()

    @app.get("/metrics", dependencies=[Depends(check_token)], response_model=None)
    def metrics() -> Response:
        return Response(served.metrics.exposition(), media_type=MEDIA_TYPE)

    @app.post("/run", dependencies=[Depends(check_token)], response_model=None)
    async def run(request: Request) -> Response:
        try:
            call = RunCall.from_bytes(await _body(request))
        except ValueError as error:
            served.metrics.refused("malformed")
            raise HTTPException(422, f"The request does not parse: {error}") from error
        except HTTPException:
            served.metrics.refused("too large")
            raise
        try:
            running = served.submit(await asyncio.to_thread(served.parse, call))
        except (Transient, Permanent) as error:
            served.metrics.refused("not now" if isinstance(error, Transient) else "not admitted")
            return JSONResponse(ErrorBody.of(error).model_dump(), status_code=STAGE_FAILED)
        return StreamingResponse(_answered(running, served), media_type="application/json")

    return app


async def _body(request: Request) -> bytes:
    """Returns the request's body, however it is sent, up to the limit."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_REQUEST_BYTES:
            raise HTTPException(413, f"The request has more than {MAX_REQUEST_BYTES} bytes.")
    return bytes(body)


async def _answered(running: "Future[Record]", served: Served) -> AsyncIterator[bytes]:
    """Yields a blank line at each sign of progress, then the `Answer`."""
    # Shielded: a client that hangs up must not cancel a call that others joined.
    waited = asyncio.shield(asyncio.wrap_future(running))
    seen = served.progress()
    yield b"\n"
    while not (await asyncio.wait({waited}, timeout=_BEAT_S))[0]:
        progress = served.progress()
        if progress != seen:
            seen = progress
            yield b"\n"
    try:
        answer = Answer(result=waited.result().model_dump(mode="json"))
    except (Transient, Permanent) as error:
        answer = Answer(error=ErrorBody.of(error))
    yield answer.to_bytes()


def main() -> None:
    """Reads the spec, serves until the parent ends or a signal comes, ends its whole group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="a ServiceSpec as JSON")
    spec = ServiceSpec.from_bytes(parser.parse_args().spec.read_bytes())
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if os.getpgrp() != os.getpid():
        os.setsid()
    code = 1
    try:
        _serve(spec)
        code = 0
    except Exception:
        logger.exception("the service failed")
    finally:
        logging.shutdown()
        kill_rest_of_own_group()
        os._exit(code)  # The engine's thread may be in a call that never returns.


def _serve(spec: ServiceSpec) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    if spec.parent_pid is not None:
        _watch_parent(spec.parent_pid, stop)
    with open_workspace(Path(spec.home)) as workspace:
        _keep_temporary_files_in(workspace.scratch)
        served = Served(spec, workspace)
        served.start()
        with _listening(spec, served):
            stop.wait()
            logger.info("ending")
            served.drain()
        served.close()


def _keep_temporary_files_in(scratch: Path) -> None:
    """Makes `scratch` the temporary directory of this process and of those that it starts.

    Engines leave files there (compiler caches, rendezvous files); in `scratch` they end with the
    service, and those of a killed one are swept. They also make sockets there, whose names the
    kernel limits: a scratch with a long path is left alone.
    """
    if len(os.fsencode(scratch)) <= _MAX_TEMPORARY_BYTES:
        os.environ["TMPDIR"] = str(scratch)
        tempfile.tempdir = None  # What was found before; the next one to ask looks anew.


@contextlib.contextmanager
def _listening(spec: ServiceSpec, served: Served) -> Iterator[None]:
    """Serves HTTP on a thread, so that signals stay with the main thread and ours."""
    app = make_app(served, Path(spec.token_file).read_text().strip())
    listener = socket.create_server((spec.host, spec.port))
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", log_config=None, timeout_graceful_shutdown=1, lifespan="off"
        )
    )
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    _write_port(Path(spec.port_file), listener.getsockname()[1])
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(_CLOSE_LIMIT_S)


def _write_port(port_file: Path, port: int) -> None:
    draft = port_file.with_suffix(".new")
    draft.touch(mode=0o600)
    draft.write_text(str(port))
    draft.replace(port_file)


def _watch_parent(parent_pid: int, stop: threading.Event) -> None:
    def watch() -> None:
        while not stop.wait(_PARENT_POLL_S):
            if os.getppid() != parent_pid:
                logger.warning("The parent (process %d) is gone; ending.", parent_pid)
                stop.set()

    def hold_lifeline() -> None:
        # The parent holds the other end of our stdin; the kernel closes it however it ends.
        while os.read(0, 1):
            pass
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    threading.Thread(target=hold_lifeline, daemon=True).start()


if __name__ == "__main__":
    main()
