"""How a controller talks to Prefect: which server, which log lines, which heartbeats."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.logging.handlers import APILogHandler, PrefectConsoleHandler
from prefect.settings import (
    PREFECT_API_URL,
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
PACKAGES = ("flows", "tasks", "storage", "rewards")


@contextmanager
def prefect_server() -> Iterator[None]:
    """Points this process's flows at a Prefect server, and keeps its log off the terminal.

    `PREFECT_API_URL` or a profile if one is set, else the server of `make up`, else Prefect's own
    temporary server.
    """
    local = local_services()
    api_url = PREFECT_API_URL.value() or (local.prefect_api_url if local else None)
    server: dict[Any, Any] = {PREFECT_API_URL: api_url} if api_url else TEMPORARY_SERVER
    with temporary_settings(server), _quiet_console():
        yield


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
    handler = APILogHandler()
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
