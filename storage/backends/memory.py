"""Objects in this process's memory: for tests and for trying things out."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from storage.errors import AlreadyExists, CommitConflict, NotFound
from storage.object_store import Listed
from storage.records import sha256_hex
from storage.store_config import StoreConfig

_STORES: dict[str, "MemoryStore"] = {}
_STORES_LOCK = threading.Lock()


def open_memory(config: StoreConfig) -> "MemoryStore":
    """Returns the store of that name; one name is one store within a process."""
    with _STORES_LOCK:
        return _STORES.setdefault(config.bucket, MemoryStore(config.bucket))


class MemoryStore:
    """An `ObjectStore` that ends with its process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """See `ObjectStore.uri`."""
        return f"memory://{self._name}"

    def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        with self._lock:
            stored = self._objects.get(key)
        if stored is None:
            raise NotFound(f"No object {key} in {self.uri}.")
        return stored

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """See `ObjectStore.get_with_etag`."""
        stored = self.get(key)
        return stored, sha256_hex(stored)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        return self.get(key)[start : start + length]

    def download(self, key: str, path: Path) -> None:
        """See `ObjectStore.download`."""
        path.write_bytes(self.get(key))

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        return len(self.get(key))

    def put(self, key: str, payload: bytes) -> None:
        """See `ObjectStore.put`."""
        with self._lock:
            self._objects[key] = bytes(payload)

    def upload(self, key: str, path: Path) -> None:
        """See `ObjectStore.upload`."""
        self.put(key, path.read_bytes())

    def put_if_absent(self, key: str, payload: bytes) -> str:
        """See `ObjectStore.put_if_absent`."""
        with self._lock:
            stored = self._objects.setdefault(key, bytes(payload))
        if stored != payload:
            raise AlreadyExists(
                f"{key} exists in {self.uri} with other bytes. Expected no object. Read it."
            )
        return sha256_hex(payload)

    def put_if_match(self, key: str, payload: bytes, etag: str) -> str:
        """See `ObjectStore.put_if_match`."""
        with self._lock:
            stored = self._objects.get(key)
            matches = stored is not None and sha256_hex(stored) == etag
            if matches:
                self._objects[key] = bytes(payload)
        if not matches and stored != payload:
            raise CommitConflict(
                f"{key} in {self.uri} is no longer what was read (etag {etag}). Reload it."
            )
        return sha256_hex(payload)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[Listed]:
        """See `ObjectStore.list`."""
        with self._lock:
            found = sorted(
                (key, len(stored))
                for key, stored in self._objects.items()
                if key.startswith(prefix) and key > start_after
            )
        return (Listed(key=key, num_bytes=size) for key, size in found)

    def folders(self, prefix: str) -> Sequence[str]:
        """See `ObjectStore.folders`."""
        inside = [entry.key.removeprefix(prefix) for entry in self.list(prefix)]
        return sorted({name.partition("/")[0] for name in inside if "/" in name})

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._lock:
            self._objects.pop(key, None)

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        """See `ObjectStore.sweep`: nothing is ever half written here."""
        return 0
