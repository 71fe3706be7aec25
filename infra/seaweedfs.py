"""A SeaweedFS server from a wheel: S3 on loopback, for laptops and tests.

Its other ports take no password: they are on loopback too, and no place to promise anything.
"""

import configparser
import json
import secrets
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from infra.daemons import Command, Daemon, answers, free_port, free_ports, spawn, wait_until
from infra.home import write_private

BUCKET = "rollbook"
_START_LIMIT_S = 90.0
_ACCESS, _SECRET = "aws_access_key_id", "aws_secret_access_key"
_ROLES = {
    "s3": "-s3.port",
    "s3_grpc": "-s3.port.grpc",
    "filer": "-filer.port",
    "filer_grpc": "-filer.port.grpc",
    "master": "-master.port",
    "master_grpc": "-master.port.grpc",
    "volume": "-volume.port",
    "volume_grpc": "-volume.port.grpc",
    "admin": "-admin.port",
    "admin_grpc": "-admin.port.grpc",
}
_OFF = (
    "-admin.ui=false",
    "-webdav=false",
    "-master.telemetry=false",
    "-s3.iam=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
)


@dataclass(frozen=True)
class S3Keys:
    """What a client signs its requests with."""

    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        """Returns the variables that boto3's credential chain reads first."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}


def s3_keys(file: Path) -> S3Keys:
    """Returns the keys in `file`; makes them up and writes them (mode 600) the first time.

    The file has the form of an AWS credentials file.
    """
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        access_key, secret_key = secrets.token_hex(10), secrets.token_urlsafe(30)
        lines = ["[default]", f"{_ACCESS} = {access_key}", f"{_SECRET} = {secret_key}", ""]
        write_private(file, "\n".join(lines))
    parser = configparser.ConfigParser()
    parser.read(file)
    section = parser["default"]
    return S3Keys(section[_ACCESS], section[_SECRET])


def start_seaweedfs(
    directory: Path, *, keys: S3Keys, log: Path, ports: dict[str, int] | None = None
) -> Daemon:
    """Starts the server on the data in `directory`; the bucket `rollbook` is made if missing.

    Call `wait_for_seaweedfs` before using it. S3 is at `daemon.ports["s3"]`.

    Args:
        directory: data and configuration.
        keys: the one identity that may read and write.
        log: is appended to.
        ports: wanted by role, as an earlier daemon had them; taken ones are replaced.

    Raises:
        ServiceError: the program is not installed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "s3.json"
    write_private(config, json.dumps(_identities(keys)))
    chosen = free_ports(dict.fromkeys(_ROLES, 0) | (ports or {}))
    argv = [str(Path(sys.executable).with_name("weed")), "-logtostderr=true", "mini"]
    argv += [f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *_OFF]
    argv += [f"{flag}={chosen[role]}" for role, flag in _ROLES.items()]
    argv += [f"-s3.config={config}", f"-bucket={BUCKET}"]
    return spawn(Command("SeaweedFS", argv, log, {}, chosen))


def wait_for_seaweedfs(daemon: Daemon) -> None:
    """Waits until the bucket exists and a volume takes writes.

    Raises:
        ServiceError: the server ended or took too long.
    """
    wanted = (
        ("filer", f"/buckets/{BUCKET}/", 200),
        ("master", f"/dir/assign?collection={BUCKET}", 200),
        ("s3", f"/{BUCKET}/", 403),
    )
    for role, path, status in wanted:
        wait_until(
            daemon,
            lambda role=role, path=path, status=status: answers(daemon, role, path, status=status),
            limit_s=_START_LIMIT_S,
        )


def endpoint(daemon: Daemon) -> str:
    """Returns the S3 endpoint."""
    return f"http://127.0.0.1:{daemon.ports['s3']}"


def remove_sockets(daemon: Daemon) -> None:
    """Removes the Unix sockets that a killed server leaves in the temporary directory.

    They are named by port: those of a port that serves somebody else by now are not its own.
    """
    for port in daemon.ports.values():
        if free_port(port) != port:
            continue
        for socket in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
            socket.unlink(missing_ok=True)


def _identities(keys: S3Keys) -> dict[str, object]:
    credentials = [{"accessKey": keys.access_key, "secretKey": keys.secret_key}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "rollbook", "credentials": credentials, "actions": actions}]}
