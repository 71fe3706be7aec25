"""Objects as files of a directory, safe under several processes of several users of it.

A new object is a fsynced temporary file that `link(2)` makes visible: it is there whole, and the
second link fails. A replacement compares and renames under a lock file. Temporary and lock files
lie in a folder of their own that listings never enter.
"""

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from storage.errors import AlreadyExists, CommitConflict, NotFound, StorageError, Unavailable
from storage.object_store import Listed
from storage.records import sha256_hex
from storage.store_config import StoreConfig

PRIVATE = ".rollbook-store"
MIN_SWEEP_AGE_S = 60.0
"""A temporary file this young may not hold its lock yet, so it is never swept."""

_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


def open_local(config: StoreConfig) -> "LocalStore":
    """Returns the store in that directory; the directory is made by the first write."""
    return LocalStore(config.directory)


def create_directory(config: StoreConfig) -> None:
    """Makes the directory of `config`. One that is there already is no error.

    Raises:
        Unavailable: it cannot be made.
    """
    try:
        config.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(
            f"Directory {config.directory} cannot be made: {error.strerror}. Expected to keep a "
            "store there: choose another place, or make it."
        ) from error


class LocalStore:
    """An `ObjectStore` in a directory. Etags are the sha256 of the content."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def uri(self) -> str:
        """See `ObjectStore.uri`."""
        return self._root.as_uri()

    def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        with self._translated(key):
            return self._path(key).read_bytes()

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """See `ObjectStore.get_with_etag`."""
        stored = self.get(key)
        return stored, sha256_hex(stored)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        with self._translated(key), self._path(key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def download(self, key: str, path: Path) -> None:
        """See `ObjectStore.download`."""
        self.size(key)
        # Outside the translation: a full disk at `path` is no fault of the store.
        shutil.copyfile(self._path(key), path)

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        with self._translated(key):
            path = self._path(key)
            if path.is_dir():
                raise NotFound(f"No object {key} in {self.uri}.")
            return path.stat().st_size

    def put(self, key: str, payload: bytes) -> None:
        """See `ObjectStore.put`."""
        with self._translated(key), self._staged() as staged:
            _write_synced(staged, payload)
            self._publish(staged, self._path(key))

    def upload(self, key: str, path: Path) -> None:
        """See `ObjectStore.upload`."""
        with self._translated(key), self._staged() as staged:
            # The temporary file keeps its inode, so that its lock stays: copyfile truncates.
            shutil.copyfile(path, staged)
            _sync(staged)
            self._publish(staged, self._path(key))

    def put_if_absent(self, key: str, payload: bytes) -> str:
        """See `ObjectStore.put_if_absent`."""
        with self._translated(key), self._staged() as staged:
            path = self._path(key)
            _write_synced(staged, payload)
            _make_folder(path.parent)
            created = _link(staged, path)
            if created:
                _sync(path.parent)
        if not created and self.get(key) != payload:
            raise AlreadyExists(
                f"{key} exists in {self.uri} with other bytes. Expected no object. Read it."
            )
        return sha256_hex(payload)

    def put_if_match(self, key: str, payload: bytes, etag: str) -> str:
        """See `ObjectStore.put_if_match`."""
        with self._translated(key), self._locked(key), self._staged() as staged:
            stored = self._stored_etag(key)
            if stored == etag:
                _write_synced(staged, payload)
                self._publish(staged, self._path(key))
        if stored not in (etag, sha256_hex(payload)):
            raise CommitConflict(
                f"{key} in {self.uri} is no longer what was read: expected etag {etag}, found "
                f"{stored}. Reload it."
            )
        return sha256_hex(payload)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[Listed]:
        """See `ObjectStore.list`.

        Raises:
            Unavailable: the directory of the store does not exist.
        """
        if not self._root.is_dir():
            raise Unavailable(
                f"There is no directory {self._root}. Expected a store there: check the address; "
                "launching a run makes it."
            )
        return self._walk(_folder_of(prefix), prefix, start_after)

    def folders(self, prefix: str) -> Sequence[str]:
        """See `ObjectStore.folders`."""
        entries = _entries(self._root / prefix)
        return sorted(name[:-1] for name, entry in entries if entry.is_dir())

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._translated(key), self._locked(key):
            self._path(key).unlink(missing_ok=True)

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        """See `ObjectStore.sweep`: temporary files of dead writers, whatever their key was."""
        oldest = time.time() - max(older_than_s, MIN_SWEEP_AGE_S)
        folder = self._root / PRIVATE / "tmp"
        found = list(folder.iterdir()) if folder.is_dir() else []
        return sum(_remove_if_dead(path) for path in found if _modified(path) < oldest)

    def _path(self, key: str) -> Path:
        parts = PurePosixPath(key).parts
        if not parts or "/".join(parts) != key or key[0] == "/" or parts[0] == PRIVATE:
            raise ValueError(f"{key!r} cannot be a key: expected names joined by single slashes.")
        if ".." in parts or "\0" in key:
            raise ValueError(f"{key!r} cannot be a key: it would leave the store.")
        return self._root.joinpath(*parts)

    def _stored_etag(self, key: str) -> str | None:
        path = self._path(key)
        return sha256_hex(path.read_bytes()) if path.is_file() else None

    def _publish(self, staged: Path, path: Path) -> None:
        _make_folder(path.parent)
        staged.replace(path)
        _sync(path.parent)

    @contextmanager
    def _staged(self) -> Iterator[Path]:
        """Yields a temporary file, locked for as long as its writer lives, removed at the end."""
        folder = self._root / PRIVATE / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / uuid.uuid4().hex
        with path.open("xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield path
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Holds the lock of the key's stripe against threads and processes; a kill frees it."""
        folder = self._root / PRIVATE / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / sha256_hex(key.encode())[:2]).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _walk(self, folder_key: str, prefix: str, start_after: str) -> Iterator[Listed]:
        for name, entry in _entries(self._root / folder_key):
            key = folder_key + name
            if entry.is_dir():
                inside = key.startswith(prefix) or prefix.startswith(key)
                beyond = key > start_after or start_after.startswith(key)
                if inside and beyond and key != f"{PRIVATE}/":
                    yield from self._walk(key, prefix, start_after)
            elif key.startswith(prefix) and key > start_after:
                yield Listed(key=key, num_bytes=entry.stat().st_size)

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._explain(error, key) from error

    def _explain(self, error: OSError, key: str) -> StorageError:
        if error.errno in _MISSING and error.filename2 is None:
            return NotFound(f"No object {key} in {self.uri}.")
        if error.errno in _FULL:
            return Unavailable(
                f"No space left for {key} in {self._root}: {error.strerror}. Nothing of it was "
                "kept. Free space there, then resume."
            )
        if error.errno in _NO_LINKS:
            return Unavailable(
                f"The file system of {self._root} refuses hard links ({error.strerror}), which "
                "commits need. Put the store on another file system, or in S3."
            )
        return Unavailable(f"{self._root} cannot serve {key}: {error.strerror}. Check its access.")


def _folder_of(prefix: str) -> str:
    """Returns the folder that holds all keys of `prefix`, so that its siblings cost nothing.

    The root where `prefix` leads into no folder that a key could name.
    """
    folder = prefix[: prefix.rfind("/") + 1]
    parts = PurePosixPath(folder).parts
    named = parts and "/".join([*parts, ""]) == folder
    return folder if named and ".." not in parts and parts[0] not in ("/", PRIVATE) else ""


def _entries(folder: Path) -> list[tuple[str, os.DirEntry[str]]]:
    """Returns the entries of a folder in key order: a directory sorts as its name with a slash."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        named = [(entry.name + "/" if entry.is_dir() else entry.name, entry) for entry in entries]
    return sorted(named, key=lambda item: item[0])


def _write_synced(path: Path, payload: bytes) -> None:
    with path.open("r+b") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _link(staged: Path, path: Path) -> bool:
    try:
        os.link(staged, path)
    except FileExistsError:
        return False
    return True


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _remove_if_dead(path: Path) -> bool:
    """Removes a temporary file whose writer's lock is gone; says whether it did."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return False  # Its writer or another sweeper was quicker.
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink(missing_ok=True)
    return True
