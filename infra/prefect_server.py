"""A Prefect server with its UI, as a background process of this host."""

import sys
from pathlib import Path

from infra.daemons import Command, Daemon, answers, spawn, wait_until

_START_LIMIT_S = 180.0


def start_prefect(directory: Path, *, database: str, port: int, log: Path) -> Daemon:
    """Starts the server; its settings live in `directory`, the user's own profile is not touched.

    Args:
        directory: PREFECT_HOME of the server.
        database: SQLAlchemy address.
        port: on loopback; must be free.
        log: is appended to.

    Raises:
        ServiceError: Prefect cannot be executed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--timeout-keep-alive", "5"]
    environment = quiet_prefect(directory) | {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
        "PREFECT_SERVER_UI_API_URL": api_url(port),
        "PREFECT_API_URL": "",
        # How soon after its time an automation sees that something did not happen.
        "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT1S",
    }
    return spawn(Command("Prefect", argv, log, environment, {"http": port}))


def wait_for_prefect(daemon: Daemon) -> None:
    """Waits until the server answers.

    Raises:
        ServiceError: it ended or took too long.
    """
    wait_until(daemon, lambda: answers(daemon, "http", "/api/health"), limit_s=_START_LIMIT_S)


def api_url(port: int) -> str:
    """Returns what PREFECT_API_URL must say."""
    return f"http://127.0.0.1:{port}/api"


def quiet_prefect(directory: Path) -> dict[str, str]:
    """Returns the environment of every Prefect process of ours: own home, nothing sent out."""
    return {
        "PREFECT_HOME": str(directory),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
