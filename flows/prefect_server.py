"""How a controller talks to Prefect: which server, which log lines, which heartbeats."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler, PrefectConsoleHandler
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    PREFECT_UI_URL,
    temporary_settings,
)

from infra.services import local_services

TEMPORARY_SERVER = {
    PREFECT_SERVER_ANALYTICS_ENABLED: False,
    # Its start takes 15 to 20 s on a quiet machine; the default limit is 20 s.
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 120,
}
ANSWERS_WITHIN_S = 5.0
"""A server that takes longer to say that it is healthy is as good as gone."""
BACKGROUND_LOGGERS = ("EventsWorker", "APILogWorker", "prefect._internal.concurrency")
"""Prefect's senders of events and log lines: they speak while the interpreter ends."""
PACKAGES = ("flows", "tasks", "storage", "rewards")


class _LinesOfThisFlow(APILogHandler):
    """Sends log lines to the flow run of whoever speaks, and those of our own threads to this one.

    A thread (a lease's, one that loads ahead) knows neither flow run nor server: Prefect would
    warn on the terminal about each of its lines instead of showing them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._context = copy_context()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if FlowRunContext.get() or TaskRunContext.get():
            super().emit(record)
        else:
            # A copy, because a context can be entered by one thread at a time only.
            self._context.copy().run(super().emit, record)


@contextmanager
def prefect_server() -> Iterator[None]:
    """Points this process's flows at a Prefect server, and keeps its log off the terminal.

    `PREFECT_API_URL` or a profile if one is set, else the server of `make up`, else Prefect's own
    temporary server.

    Raises:
        ValueError: the server does not answer.
    """
    check_server()
    api_url = _api_url()
    server: dict[Any, Any] = {PREFECT_API_URL: api_url} if api_url else TEMPORARY_SERVER
    with temporary_settings(server), _quiet_console():
        yield


def check_server() -> None:
    """Checks that the server that flows would talk to answers; a temporary one always will.

    Raises:
        ValueError: it does not, or refuses.
    """
    api_url = _api_url()
    if api_url is None:
        return
    settings: dict[Any, Any] = {PREFECT_API_URL: api_url, PREFECT_CLIENT_MAX_RETRIES: 0}
    # Prefect's client, not a bare request: certificates and keys are what flows will use.
    with (
        temporary_settings(settings),
        get_client(httpx_settings={"timeout": ANSWERS_WITHIN_S}, sync_client=True) as client,
    ):
        problem = client.api_healthcheck()
    if problem is not None:
        cause = (str(problem) or type(problem).__name__).splitlines()[0]
        raise ValueError(
            f"The Prefect server at {api_url} (PREFECT_API_URL, or the local one) does not answer "
            f"as it should: {cause}. Start it (`make up` starts a local one), correct "
            "PREFECT_API_URL, or unset it."
        )


def _api_url() -> str | None:
    local = local_services()
    return PREFECT_API_URL.value() or (local.prefect_api_url if local else None)


@contextmanager
def controller_settings() -> Iterator[None]:
    """Settings of a flow that advances a run: our log lines go to the UI, steps stay quick.

    Prefect joins a heartbeat thread at the end of every flow run, about a second each; the run's
    own flow keeps its heartbeat, its steps go without.
    """
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}), _our_log_lines():
        yield


def run_url(flow_run_id: str | None) -> str | None:
    """Returns where the UI shows a flow run, or None without a lasting server."""
    api_url = PREFECT_API_URL.value()
    ui = PREFECT_UI_URL.value() or (api_url.removesuffix("/api") if api_url else None)
    return f"{ui}/runs/flow-run/{flow_run_id}" if ui and flow_run_id else None


@contextmanager
def _our_log_lines() -> Iterator[None]:
    handler = _LinesOfThisFlow()
    loggers = [logging.getLogger(name) for name in PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


@contextmanager
def _quiet_console() -> Iterator[None]:
    for name in BACKGROUND_LOGGERS:
        # For good, because they speak after the block, and with a filter, because Prefect's own
        # logging setup resets levels.
        logging.getLogger(name).addFilter(_nothing)
    handlers = [
        handler
        for name in ("", *logging.root.manager.loggerDict)
        for handler in logging.getLogger(name).handlers
        if isinstance(handler, PrefectConsoleHandler)
    ]
    levels = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


def _nothing(_: logging.LogRecord) -> bool:
    return False
