"""What every store backend can do. No keys, no records, no Parquet here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Listed:
    """One entry of a listing."""

    key: str
    num_bytes: int


class ObjectStore(Protocol):
    """Objects by key, with the two conditional puts that commits need.

    Safe to use from several threads. Every method raises `Unavailable` when the store cannot be
    reached or refuses the credentials.
    """

    @property
    def uri(self) -> str:
        """Absolute address, `s3://bucket/prefix`, `file:///dir` or `memory://name`."""
        ...

    def get(self, key: str) -> bytes:
        """Returns the object.

        Raises:
            NotFound: there is none.
        """
        ...

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """Returns the object and the etag to give `put_if_match`.

        Raises:
            NotFound: there is none.
        """
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Returns up to `length` bytes from offset `start`.

        Raises:
            NotFound: there is none.
        """
        ...

    def download(self, key: str, path: Path) -> None:
        """Writes the object to `path`, in parallel ranges where it is large.

        Raises:
            NotFound: there is none.
        """
        ...

    def size(self, key: str) -> int:
        """Returns the number of bytes of the object.

        Raises:
            NotFound: there is none.
        """
        ...

    def put(self, key: str, payload: bytes) -> None:
        """Writes the object whole or not at all. Only for keys that one attempt owns.

        Raises:
            CommitUnknown: the answer was lost and retries did not settle it.
        """
        ...

    def upload(self, key: str, path: Path) -> None:
        """Writes the file at `path` as one object, in parallel parts where it is large.

        Raises:
            CommitUnknown: the answer was lost and retries did not settle it.
        """
        ...

    def put_if_absent(self, key: str, payload: bytes) -> str:
        """Creates the object and returns its etag. Ours found already there counts as created.

        Raises:
            AlreadyExists: another writer created it with other bytes.
            CommitUnknown: the answer was lost and a re-read did not settle it.
        """
        ...

    def put_if_match(self, key: str, payload: bytes, etag: str) -> str:
        """Replaces the object if its etag is still `etag`; returns the new etag.

        Raises:
            CommitConflict: it changed, or is gone.
            CommitUnknown: the answer was lost and a re-read did not settle it.
        """
        ...

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[Listed]:
        """Yields the objects whose key starts with `prefix`, in key order, however many.

        `start_after` leaves out the keys up to and including it, without reading through them.
        Rely on the order only among names of one length, such as numbered steps: servers that
        keep folders (SeaweedFS) list `a/x` before `a-b/x`.
        """
        ...

    def folders(self, prefix: str) -> Sequence[str]:
        """Returns the names between `prefix` (which ends in a slash) and the next slash, sorted."""
        ...

    def delete(self, key: str) -> None:
        """Deletes the object; deleting what is not there is no error."""
        ...

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        """Drops what dead writers left unfinished under `prefix`; returns how many pieces.

        Open multipart uploads and temporary files: never visible as objects, but they cost space.
        `older_than_s` 0 is for a caller that knows that no writer lives under `prefix`.
        """
        ...
