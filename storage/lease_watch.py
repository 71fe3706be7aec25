"""Watches the leases of many services of a run: who of them is alive right now.

By the rule of `leases`: dead is who stayed unchanged for its time on this process's own clock, or
whose process on this host is gone.
"""

import threading
import time

from storage.layout import lease_role, leases_prefix
from storage.leases import LeaseState, is_gone, read_lease
from storage.object_store import ObjectStore


class LeaseWatch:
    """Leases of `run` whose role starts with `prefix`. Safe to use from several threads."""

    def __init__(self, store: ObjectStore, run: str, prefix: str) -> None:
        self._store = store
        self._run = run
        self._prefix = prefix
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, float]] = {}
        """By role: the etag last seen, and when it was seen first."""

    def living(self) -> list[LeaseState]:
        """Returns the holders that may be alive, by role: one seen for the first time counts.

        Raises:
            StorageError: the leases cannot be read.
        """
        with self._lock:
            now = time.monotonic()
            found = {role: read_lease(self._store, self._run, role) for role in self._roles()}
            alive: list[LeaseState] = []
            for role, lease in sorted(found.items()):
                if lease is None or lease[0] is None:
                    continue
                state, etag = lease[0], lease[1]
                if self._seen.get(role, ("", 0.0))[0] != etag:
                    self._seen[role] = (etag, now)
                silent_s = now - self._seen[role][1]
                if not (state.released or is_gone(state) or silent_s > state.ttl_s):
                    alive.append(state)
            return alive

    def _roles(self) -> list[str]:
        listed = self._store.list(f"{leases_prefix(self._run)}{self._prefix}")
        return [lease_role(entry.key) for entry in listed]
