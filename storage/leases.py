"""Who is alive: leases that the living renew. They give liveness, never safety.

Two holders may overlap for a moment; the conditional puts of the ledger keep one history.
Dead means: unchanged for its time on the observer's own clock, or on the same host (same boot)
with its process gone. No clock of another machine is ever compared with ours.
"""

import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psutil

from storage.errors import (
    AlreadyExists,
    CommitConflict,
    CommitUnknown,
    LeaseHeld,
    NotFound,
    StorageError,
    Unavailable,
)
from storage.layout import lease_key
from storage.object_store import ObjectStore
from storage.records import Record, why_invalid

_log = logging.getLogger(__name__)

RENEWALS_PER_TTL = 3
POLLS_PER_TTL = 5
NUM_TRIES = 10


class LeaseState(Record):
    """What a lease holds in the store. `holder` is for whoever looks the holder up."""

    run: str
    role: str
    holder: dict[str, Any]
    token: str
    beat: int
    ttl_s: float
    host: str
    boot_id: str
    pid: int
    started: float
    """When the holder's process started: tells a reused pid apart. In clock ticks since boot where
    there is /proc, so that setting the clock changes nothing; else seconds since the epoch."""
    since: float
    """When the lease was taken, seconds since the epoch on the holder's clock. For reports."""
    released: bool = False


@dataclass(frozen=True)
class Liveness:
    """What `look` saw: `free` (nobody's, or let go), `alive`, or `dead` without letting go."""

    kind: Literal["free", "alive", "dead"]
    holder: LeaseState | None


def hold(
    store: ObjectStore,
    run: str,
    role: str,
    holder: Mapping[str, Any] | None = None,
    *,
    ttl_s: float = 10.0,
) -> "Lease":
    """Takes the lease of `role` in `run` and renews it in a thread until the context ends.

    Waits up to the present holder's `ttl_s` to see whether it lives; returns at once if there is
    none, it was released, or its process on this host is gone.

    Args:
        store: opened for writing.
        run: name of the run.
        role: `controller`, or the name of a service.
        holder: facts for readers, such as an address. Plain JSON values.
        ttl_s: seconds without a sign of life after which others may take over.

    Raises:
        LeaseHeld: somebody living holds it; names host, pid and age.
    """
    state = LeaseState(
        run=run,
        role=role,
        holder=dict(holder or {}),
        token=uuid.uuid4().hex,
        beat=0,
        ttl_s=ttl_s,
        host=platform.node(),
        boot_id=_boot_id(),
        pid=os.getpid(),
        started=_started(os.getpid()) or 0.0,
        since=time.time(),
    )
    return Lease(store, state, _take(store, state))


def peek(store: ObjectStore, run: str, role: str) -> LeaseState | None:
    """Returns who holds a lease as far as the store says, or None if nobody does.

    The holder may be dead all the same: this looks once and does not wait.
    """
    found = _read(store, lease_key(run, role))
    if found is None or found[0] is None:
        return None
    state = found[0]
    return None if state.released or is_gone(state) else state


def look(store: ObjectStore, run: str, role: str) -> Liveness:
    """Returns what became of whoever held a lease, watching it for a while where it must.

    At once for a lease of this host, a free one and a released one. A holder elsewhere is alive
    at its next sign of life, which comes within a third of its `ttl_s`, and dead after `ttl_s`
    without one.
    """
    found = _read(store, lease_key(run, role))
    state, etag = found if found else (None, "")
    if state is None or state.released:
        return Liveness("free", state)
    if is_gone(state):
        return Liveness("dead", state)
    if _is_ours_to_see(state):
        return Liveness("alive", state)
    try:
        _await_death(store, lease_key(run, role), state, etag)
    except LeaseHeld:
        return Liveness("alive", state)
    except CommitConflict:
        return Liveness("free", state)
    return Liveness("dead", state)


class Lease:
    """A lease that this process holds; a context manager that releases it."""

    def __init__(self, store: ObjectStore, state: LeaseState, etag: str) -> None:
        self._store = store
        self._state = state
        self._etag = etag
        self._holder = state.holder
        self._released = False
        self._ended = threading.Event()
        self._lost = threading.Event()
        self._renewer = threading.Thread(
            target=self._renew_until_ended, name=f"lease-{state.role}", daemon=True
        )
        self._renewer.start()

    @property
    def lost(self) -> bool:
        """Whether another process took the lease; then stop soon, the puts decide anyway."""
        return self._lost.is_set()

    @property
    def state(self) -> LeaseState:
        """What the store holds, as of the last renewal."""
        return self._state

    def describe(self, holder: Mapping[str, Any]) -> None:
        """Says other facts about the holder, from the next renewal on."""
        self._holder = dict(holder)

    def release(self) -> None:
        """Ends the renewals and lets the next holder in at once. A second call does nothing."""
        if self._released:
            return
        self._released = True
        self._ended.set()
        self._renewer.join()
        if self.lost:
            return
        try:
            self._write(self._state.model_copy(update={"released": True}))
        except StorageError as error:
            _log.warning("Lease %s was not released, it ends by itself: %s", self._key, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def _key(self) -> str:
        return lease_key(self._state.run, self._state.role)

    def _write(self, state: LeaseState) -> None:
        self._etag = self._store.put_if_match(self._key, state.to_bytes(), self._etag)
        self._state = state

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(self._state.ttl_s / RENEWALS_PER_TTL):
            state = self._state.model_copy(
                update={"beat": self._state.beat + 1, "holder": self._holder}
            )
            try:
                self._write(state)
            except StorageError as error:
                self._look_after(error)

    def _look_after(self, error: StorageError) -> None:
        """After a renewal that failed: an answer may be lost, or another may hold the lease."""
        _log.warning("Lease %s was not renewed: %s", self._key, error)
        try:
            found = _read(self._store, self._key)
        except StorageError:
            return
        if found is not None and found[0] and found[0].token == self._state.token:
            self._etag = found[1]
        else:
            self._lost.set()
            self._ended.set()


def _take(store: ObjectStore, state: LeaseState) -> str:
    """Puts `state` where no living holder's is; returns the etag."""
    key = lease_key(state.run, state.role)
    for _ in range(NUM_TRIES):
        found = _read(store, key)
        held = found[0] if found else None
        if found and held and held.token == state.token:
            return found[1]
        try:
            if found is None:
                return store.put_if_absent(key, state.to_bytes())
            if held:
                _await_death(store, key, held, found[1])
            return store.put_if_match(key, state.to_bytes(), found[1])
        except (AlreadyExists, CommitConflict, CommitUnknown) as error:
            _log.info("Lease %s: somebody was quicker, looking at who: %s", key, error)
    raise Unavailable(
        f"Lease {key} could not be taken in {NUM_TRIES} tries: others keep taking it and letting "
        "it go. Expected it free or held. Look at who starts controllers of this run."
    )


def _await_death(store: ObjectStore, key: str, state: LeaseState, etag: str) -> None:
    """Returns once the holder is dead; raises `LeaseHeld` at its next sign of life."""
    patience_s = state.ttl_s
    deadline = time.monotonic() + patience_s
    while not (state.released or is_gone(state)) and time.monotonic() < deadline:
        time.sleep(patience_s / POLLS_PER_TTL)
        found = _read(store, key)
        if found is None or found[1] != etag:
            if found is not None and found[0] and not found[0].released:
                raise _held(found[0])
            raise CommitConflict(f"Lease {key} was let go meanwhile. Take it anew.")


def read_lease(store: ObjectStore, run: str, role: str) -> tuple[LeaseState | None, str] | None:
    """Returns what the lease of `role` holds and its etag, or None if there is none.

    The state is None where it does not parse: nobody holds it.
    """
    return _read(store, lease_key(run, role))


def _read(store: ObjectStore, key: str) -> tuple[LeaseState | None, str] | None:
    """Returns what a lease holds and its etag; no state if it does not parse, so nobody's."""
    try:
        payload, etag = store.get_with_etag(key)
    except NotFound:
        return None
    try:
        return LeaseState.from_bytes(payload), etag
    except ValueError as error:
        _log.warning("%s is no lease and counts as free: %s", key, why_invalid(error))
        return None, etag


def is_gone(state: LeaseState) -> bool:
    """Returns whether the holder ran on this boot of this host and its process is no more."""
    return _is_ours_to_see(state) and _started(state.pid) != state.started


def _is_ours_to_see(state: LeaseState) -> bool:
    """Whether the holder's process id means something here: the same boot of the same host."""
    return (state.host, state.boot_id) == (platform.node(), _boot_id())


def _started(pid: int) -> float | None:
    """Returns when a process started (see `LeaseState.started`), or None if it has ended."""
    if not Path("/proc/self/stat").is_file():
        return _started_by_clock(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold spaces and parentheses itself.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else float(fields[19])


def _started_by_clock(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        ended = process.status() == psutil.STATUS_ZOMBIE
        return None if ended else process.create_time()
    except psutil.NoSuchProcess:
        return None


def _boot_id() -> str:
    """Within which process ids mean the same: this boot, and this container."""
    path = Path("/proc/sys/kernel/random/boot_id")
    boot = path.read_text().strip() if path.is_file() else str(psutil.boot_time())
    namespace = Path("/proc/self/ns/pid")
    return f"{boot}/{os.readlink(namespace)}" if namespace.is_symlink() else boot


def _held(state: LeaseState) -> LeaseHeld:
    age_s = max(0.0, time.time() - state.since)
    began = datetime.fromtimestamp(state.since, UTC).isoformat(sep=" ", timespec="seconds")
    url = state.holder.get("flow_run_url")
    shown_at = f" ({url})" if url else ""
    return LeaseHeld(
        f"Run {state.run!r} has a living {state.role}: process {state.pid} on {state.host}, since "
        f"{began}, for {age_s:.0f} s{shown_at}. Expected none. Wait for it or end it; a lease "
        f"whose holder died ends by itself after {state.ttl_s:.0f} s."
    )
