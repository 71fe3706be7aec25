"""How a controller talks to Prefect: which server, which log lines, which heartbeats."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging.handlers import APILogHandler, PrefectConsoleHandler
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_UI_URL,
    temporary_settings,
)

from infra.services import local_services

PACKAGES = ("flows", "tasks", "storage", "rewards")


@contextmanager
def prefect_server() -> Iterator[str | None]:
    """Points this process's flows at a Prefect server and yields its API address.

    `PREFECT_API_URL` or a profile if one is set, else the server of `make up`, else Prefect's own
    temporary server (None is yielded). While the block lasts our packages' log lines go to
    the UI and Prefect's stay off the terminal, where the progress is.
    """
    local = local_services()
    api_url = PREFECT_API_URL.value() or (local.prefect_api_url if local else None)
    settings = {PREFECT_API_URL: api_url} if api_url else {}
    # A heartbeat thread is joined at the end of every flow run, a second each; the lease of the
    # run says who is alive (FACTS: 1.1 s a step with heartbeats, 0.2 s without).
    settings[PREFECT_FLOWS_HEARTBEAT_FREQUENCY] = None
    with temporary_settings(settings), _our_log_lines(), _quiet_console():
        yield api_url


def run_url(api_url: str | None, flow_run_id: str) -> str | None:
    """Returns where the UI shows a flow run, or None without a lasting server."""
    ui = PREFECT_UI_URL.value() or (api_url.removesuffix("/api") if api_url else None)
    return f"{ui}/runs/flow-run/{flow_run_id}" if ui else None


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
