"""The trainer's processes: starts them, commands all of them at once, ends all of them at once.

A command is a collective: every rank gets it, and none may be left waiting for another. So when
one fails, all end; what all of them refuse alike, they survive.
"""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tasks.errors import Permanent, Transient
from tasks.processes import end_group
from tasks.train.contract import TrainConfig

logger = logging.getLogger(__name__)

BEAT_VARIABLE = "ROLLBOOK_RANK_BEAT"
_TAIL_BYTES = 1500
_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class _Member:
    process: "subprocess.Popen[bytes]"
    connection: Connection
    log: Path
    beat: Path
    """Touched by the rank at every micro-batch."""


class Ranks:
    """Running ranks. They end with this object's `close` or with this process, however it ends.

    Each rank has its own session and one end of a socket pair that no one else can open. The
    thread that starts them must live as long as they do: the kernel ends them with it.
    """

    def __init__(
        self, config: TrainConfig, *, model_dir: Path, extensions: Path, log_dir: Path
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        environments = [
            _environment(config, rank=rank, port=port, extensions=extensions)
            | {BEAT_VARIABLE: str(log_dir / f"rank-{rank}.beat")}
            for rank in range(config.ranks)
        ]
        self._shared = [shared_memory(port, rank) for rank in range(config.ranks)]
        self._members: list[_Member] = []
        self._closed = False
        try:
            for rank, environment in enumerate(environments):
                self._members.append(_launch(environment, log_dir / f"rank-{rank}.log"))
        except BaseException:
            self.close()
            raise
        fields = config.model_dump(mode="json")
        arguments = [
            {"model_dir": str(model_dir), "config": fields, "rank": rank}
            for rank in range(config.ranks)
        ]
        self._call("start", [((), named) for named in arguments])

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [member.process.pid for member in self._members]

    def call(self, name: str, *positional: Any, **named: Any) -> list[Any]:
        """Returns every rank's answer to one command with the same arguments.

        Raises:
            Permanent: the ranks refused, or one failed in a way that a retry repeats.
            Transient: a rank died. All have ended after a death or failure.
        """
        return self._call(name, [(positional, named)] * len(self._members))

    def call_each(self, name: str, parts: Sequence[Any], **named: Any) -> list[Any]:
        """Returns every rank's answer to one command; rank i gets `parts[i]` first.

        Raises:
            Permanent, Transient: see `call`.
        """
        return self._call(name, [((part,), named) for part in parts])

    def progress(self) -> int:
        """Returns a number that grows with every micro-batch of every rank."""
        return sum(
            member.beat.stat().st_mtime_ns for member in self._members if member.beat.exists()
        )

    @property
    def closed(self) -> bool:
        """Whether the ranks have ended: after `close`, or after a call that failed."""
        return self._closed

    def close(self) -> None:
        """Ends all ranks. Safe to call twice."""
        self._closed = True
        for member in self._members:
            member.connection.close()
        for member in self._members:
            end_group(member.process, grace_s=0.0)
        for path in self._shared:
            # There is one only if its rank was killed before it took the name off itself.
            path.unlink(missing_ok=True)

    def _call(self, name: str, arguments: Sequence[tuple[Any, Any]]) -> list[Any]:
        try:
            answers = self._exchange(name, arguments)
        except BaseException:
            # An answer that nobody waits for would be taken for the next command's.
            self.close()
            raise
        refusals = [answer for kind, answer in answers if kind == "refused"]
        if refusals:
            raise Permanent(refusals[0])
        return [answer for _, answer in answers]

    def _exchange(self, name: str, arguments: Sequence[tuple[Any, Any]]) -> list[tuple[str, Any]]:
        for member, (positional, named) in zip(self._members, arguments, strict=True):
            self._send(member, (name, positional, named))
        waiting = {member.connection: rank for rank, member in enumerate(self._members)}
        answers: dict[int, tuple[str, Any]] = {}
        while waiting:
            for connection in wait(list(waiting)):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                answers[rank] = kind, answer = self._receive(rank)
                if kind == "failed":
                    raise Permanent(f"Trainer rank {rank} failed: {answer}{self._tail(rank)}")
        return [answers[rank] for rank in range(len(self._members))]

    def _send(self, member: _Member, command: tuple[str, Any, Any]) -> None:
        try:
            member.connection.send(command)
        except OSError as error:
            raise self._death(self._members.index(member)) from error

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            return self._members[rank].connection.recv()
        except (EOFError, OSError) as error:
            raise self._death(rank) from error

    def _death(self, rank: int) -> Transient:
        code = self._members[rank].process.wait()
        hint = " (often: memory ran out)" if code == -9 else ""
        return Transient(
            f"Trainer rank {rank} ended with code {code}{hint} during a call. Its state is lost; "
            f"the next call starts the ranks again and restores it.{self._tail(rank)}"
        )

    def _tail(self, rank: int) -> str:
        log = self._members[rank].log
        text = log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
        return f"\nThe end of its log, {log}:\n{text}" if text else ""


def shared_memory(port: int | str, rank: int) -> Path:
    """Returns the file of a rank's all-reduce buffer, as DeepSpeed 0.19.8 names it."""
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{_ADDRESS}_{port}_{rank}"
    return Path("/dev/shm") / name


def _launch(environment: dict[str, str], log: Path) -> _Member:
    command = [sys.executable, "-m", "tasks.train.worker"]
    ours, theirs = Pipe()
    with closing(theirs), ExitStack() as undo, log.open("ab") as output:
        undo.callback(ours.close)
        process = subprocess.Popen(
            [*command, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        undo.pop_all()
    return _Member(process, ours, log, Path(environment[BEAT_VARIABLE]))


def _environment(config: TrainConfig, *, rank: int, port: int, extensions: Path) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(config.ranks),
        "LOCAL_SIZE": str(config.ranks),
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(config.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "TOKENIZERS_PARALLELISM": "false",
        # glibc gives large blocks back to the kernel at every free and faults them in again: a
        # third of the CPU time of a step on a 135M model. Kept, they cost memory up to the peak.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.create_server((_ADDRESS, 0)) as server:
        return server.getsockname()[1]
