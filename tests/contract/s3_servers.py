"""Starts the S3 servers that the store's tests run against, and ends them by pid."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moto.server import ThreadedMotoServer

from storage.errors import Unavailable
from storage.opening import create_bucket
from storage.store_config import StoreConfig

ACCESS_KEY = "rollbook"
SECRET_KEY = "rollbook-secret"
BUCKET = "rollbook"


def free_ports(count: int) -> list[int]:
    """Ports that are free now, together with the ones 10,000 above (SeaweedFS's gRPC)."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port = low.getsockname()[1]
            if port + 10_000 > 65_535 or port in found:
                continue
            if high.connect_ex(("127.0.0.1", port + 10_000)) != 0:
                found.append(port)
    return found


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
def seaweed_server(folder: Path) -> Iterator[str]:
    """Runs a real S3 server in `folder`; yields its endpoint once it has a bucket."""
    keys = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
    identity = {"name": "rollbook", "credentials": [keys], "actions": ["Admin", "Read", "Write"]}
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    (folder / "objects").mkdir()
    s3, master, volume, filer, admin = free_ports(5)
    command = [
        str(Path(sys.executable).parent / "weed"),
        "-logtostderr=true",
        "mini",
        f"-dir={folder / 'objects'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-admin.ui=false",
        "-webdav=false",
        "-master.telemetry=false",
        f"-s3.port={s3}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={config}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        f"-admin.port={admin}",
    ]
    endpoint = f"http://127.0.0.1:{s3}"
    with (folder / "weed.log").open("wb") as log:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            _await_bucket(StoreConfig(uri=f"s3://{BUCKET}", endpoint=endpoint), server)
            yield endpoint
        finally:
            _end(server)


def _die_with_parent() -> None:
    """Tests that are killed leave no server behind (Linux: PR_SET_PDEATHSIG is 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _await_bucket(config: StoreConfig, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return create_bucket(config)
        except Unavailable:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _end(server: "subprocess.Popen[bytes]") -> None:
    # Nothing of it is kept, and its orderly end takes ten seconds.
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
