"""What a killed SeaweedFS leaves, told from what another one uses."""

import socket
import tempfile
from pathlib import Path

import pytest

from infra.daemons import Daemon, free_port
from infra.seaweedfs import remove_sockets


def test_sockets_go_unless_their_port_serves_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as another:
        ports = {"filer": another.getsockname()[1], "s3": free_port()}
        files = {role: tmp_path / f"seaweedfs-{role}-{port}.sock" for role, port in ports.items()}
        for file in files.values():
            file.touch()
        remove_sockets(Daemon("SeaweedFS", 1, 0, "an earlier boot", "", ports))
    assert files["filer"].exists()
    assert not files["s3"].exists()
