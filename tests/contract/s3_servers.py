"""Starts the S3 servers that the store's tests run against, and ends them by pid."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moto.server import ThreadedMotoServer

from infra.daemons import Daemon, start_listening, stop
from infra.seaweedfs import (
    BUCKET,
    S3Keys,
    endpoint,
    remove_sockets,
    start_seaweedfs,
    wait_for_seaweedfs,
)

__all__ = ["ACCESS_KEY", "BUCKET", "SECRET_KEY", "moto_server", "seaweed_server"]

ACCESS_KEY = "rollbook"
SECRET_KEY = "rollbook-secret"


@contextmanager
def moto_server() -> Iterator[str]:
    """Runs moto in a thread of this process; yields its endpoint."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextmanager
def seaweed_server(folder: Path, keys: S3Keys | None = None) -> Iterator[str]:
    """Runs a real S3 server in `folder`; yields its endpoint once it has a bucket."""
    keys = keys or S3Keys(ACCESS_KEY, SECRET_KEY)

    def start() -> Daemon:
        return start_seaweedfs(folder / "objects", keys=keys, log=folder / "weed.log")

    server = start_listening(start, wait_for_seaweedfs)
    with _ended_with_us(server.pid):
        yield endpoint(server)
        # Nothing of it is kept, and its orderly end takes seconds.
        stop(server, how=signal.SIGKILL)
        remove_sockets(server)


@contextmanager
def _ended_with_us(group: int) -> Iterator[None]:
    """Kills a process group at the end of the block, also when this process is killed in it."""
    watch = subprocess.Popen(
        ["sh", "-c", f"read gone; kill -9 -{group} 2>&-"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watch.communicate()
