"""A real store that fails once, at the n-th call: before it takes effect, or after.

`from tests.contract.faulty_store import FaultyStore`
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from storage.errors import CommitUnknown, StorageError
from storage.object_store import Listed, ObjectStore

_Returned = TypeVar("_Returned")


class FaultyStore:
    """Passes every call on to `store`, except that call number `fail_at` (from 1) raises `error`.

    `when="after"`: the call takes effect and its answer is lost. With `fail_at=0` it only counts.
    """

    def __init__(
        self,
        store: ObjectStore,
        fail_at: int = 0,
        *,
        when: Literal["before", "after"] = "before",
        error: type[BaseException] = CommitUnknown,
    ) -> None:
        self._store = store
        self._fail_at = fail_at
        self._when = when
        self._error = error
        self._lock = threading.Lock()
        self.calls: list[str] = []
        """What was called, in order: `put_if_absent runs/...`."""

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    @property
    def uri(self) -> str:
        return self._store.uri

    def get(self, key: str) -> bytes:
        return self._call(f"get {key}", lambda: self._store.get(key))

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        return self._call(f"get_with_etag {key}", lambda: self._store.get_with_etag(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._call(f"get_range {key}", lambda: self._store.get_range(key, start, length))

    def download(self, key: str, path: Path) -> None:
        self._call(f"download {key}", lambda: self._store.download(key, path))

    def size(self, key: str) -> int:
        return self._call(f"size {key}", lambda: self._store.size(key))

    def put(self, key: str, payload: bytes) -> None:
        self._call(f"put {key}", lambda: self._store.put(key, payload))

    def upload(self, key: str, path: Path) -> None:
        self._call(f"upload {key}", lambda: self._store.upload(key, path))

    def put_if_absent(self, key: str, payload: bytes) -> str:
        return self._call(f"put_if_absent {key}", lambda: self._store.put_if_absent(key, payload))

    def put_if_match(self, key: str, payload: bytes, etag: str) -> str:
        return self._call(
            f"put_if_match {key}", lambda: self._store.put_if_match(key, payload, etag)
        )

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[Listed]:
        return self._call(
            f"list {prefix}", lambda: self._store.list(prefix, start_after=start_after)
        )

    def folders(self, prefix: str) -> Sequence[str]:
        return self._call(f"folders {prefix}", lambda: self._store.folders(prefix))

    def delete(self, key: str) -> None:
        self._call(f"delete {key}", lambda: self._store.delete(key))

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        return self._call(
            f"sweep {prefix}", lambda: self._store.sweep(prefix, older_than_s=older_than_s)
        )

    def _call(self, name: str, call: Callable[[], _Returned]) -> _Returned:
        with self._lock:
            self.calls.append(name)
            fails = len(self.calls) == self._fail_at
        if not fails:
            return call()
        if self._when == "after":
            # Whatever the answer is, an error included: it is lost.
            with contextlib.suppress(StorageError):
                call()
        raise self._error(f"Provoked: call {self._fail_at} ({name}) fails {self._when} it acts.")


def fault_points(
    run: Callable[[ObjectStore], object], make_store: Callable[[], ObjectStore]
) -> Iterator[FaultyStore]:
    """Yields a fresh faulty store for every call that `run` makes on a healthy one, both ways."""
    counting = FaultyStore(make_store())
    run(counting)
    for fail_at in range(1, counting.num_calls + 1):
        for when in ("before", "after"):
            yield FaultyStore(make_store(), fail_at, when=when, error=StorageError)
