"""Data objects named by their sha256, and the content-addressed cache on this host.

The cache is disposable and shared by processes: `<cache>/<sha256[:2]>/<sha256>`. Files come into
it whole, by rename, and are hashed again at every use.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from storage.errors import Corrupt, NotFound, Unavailable
from storage.object_store import ObjectStore
from storage.records import ObjectRef, sha256_hex


def put_object(
    store: ObjectStore, key: str, payload: bytes, *, rows: int | None = None
) -> ObjectRef:
    """Writes `payload` under a key that one attempt owns and returns the reference to it.

    A second call with the same bytes changes nothing.

    Raises:
        CommitUnknown: the answer was lost and retries did not settle it.
    """
    store.put(key, payload)
    return ObjectRef(key=key, sha256=sha256_hex(payload), num_bytes=len(payload), rows=rows)


def read_object(store: ObjectStore, ref: ObjectRef) -> bytes:
    """Returns the object that `ref` names.

    Raises:
        NotFound: it is gone.
        Corrupt: its bytes are not those that `ref` names.
    """
    payload = store.get(ref.key)
    _check(store, ref, num_bytes=len(payload), sha256=sha256_hex(payload))
    return payload


def exists(store: ObjectStore, key: str) -> bool:
    """Tells whether there is an object under a key."""
    try:
        store.size(key)
    except NotFound:
        return False
    return True


def is_there(store: ObjectStore, ref: ObjectRef) -> bool:
    """Tells whether the object of a reference is there and as long as it should be."""
    try:
        return store.size(ref.key) == ref.num_bytes
    except NotFound:
        return False


def upload_file(store: ObjectStore, key: str, path: Path) -> ObjectRef:
    """Writes the file at `path` as one object and returns the reference to it."""
    ref = ObjectRef(key=key, sha256=file_sha256(path), num_bytes=path.stat().st_size)
    store.upload(key, path)
    return ref


def fetch_file(store: ObjectStore, ref: ObjectRef, *, cache: Path) -> Path:
    """Returns a file with the object's bytes, from the cache or downloaded into it.

    Read it, never write to it. Safe for several processes at once.

    Raises:
        NotFound: it is in neither.
        Corrupt: the store holds other bytes than those that `ref` names.
        Unavailable: the store cannot be reached, or the cache cannot be written.
    """
    path = cache_path(cache, ref.sha256)
    if path.is_file() and file_sha256(path) == ref.sha256:
        return path
    try:
        _download(store, ref, path)
    except OSError as error:
        raise Unavailable(
            f"The cache {cache} cannot keep {ref.key} ({ref.num_bytes} bytes): {error.strerror}. "
            "Free space there (all of it may be deleted), then resume."
        ) from error
    return path


def offer_file(cache: Path, path: Path, sha256: str) -> Path:
    """Puts a just-written file into the cache, so that a reader on this host downloads nothing.

    The file at `path` is linked where the file system can: whoever writes into it in place later
    spoils the cached copy, which readers notice and download again.
    """
    target = cache_path(cache, sha256)
    target.parent.mkdir(parents=True, exist_ok=True)
    landing = target.with_name(f".{uuid.uuid4().hex}")
    try:
        os.link(path, landing)
    except OSError:
        shutil.copyfile(path, landing)
    landing.replace(target)
    # Renaming one link of a file onto another does nothing (POSIX), and leaves the first.
    landing.unlink(missing_ok=True)
    return target


def link_directory(directory: Path, files: Mapping[str, Path]) -> Path:
    """Makes `directory` hold exactly `files` (name -> cached file), as links, all at once.

    A directory that is there already is taken as it is: its name must say what it holds.
    """
    if directory.is_dir() and all((directory / name).is_file() for name in files):
        return directory
    building = directory.with_name(f".{uuid.uuid4().hex}")
    for name, path in files.items():
        link = building / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())
    shutil.rmtree(directory, ignore_errors=True)
    try:
        building.rename(directory)
    except OSError:
        # Another process was first, with the same content.
        shutil.rmtree(building)
    return directory


def cache_path(cache: Path, sha256: str) -> Path:
    """Where the cache keeps the file of that digest."""
    return cache / sha256[:2] / sha256


def file_sha256(path: Path) -> str:
    """Returns the lower-case hex sha256 of a file; the hashing lets other threads run."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(store: ObjectStore, ref: ObjectRef, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    landing = path.with_name(f".{uuid.uuid4().hex}")
    try:
        store.download(ref.key, landing)
        _check(store, ref, num_bytes=landing.stat().st_size, sha256=file_sha256(landing))
        landing.replace(path)
    finally:
        landing.unlink(missing_ok=True)


def _check(store: ObjectStore, ref: ObjectRef, *, num_bytes: int, sha256: str) -> None:
    if sha256 != ref.sha256:
        raise Corrupt(
            f"{ref.key} in {store.uri} is not what its record names: expected {ref.num_bytes} "
            f"bytes with sha256 {ref.sha256}, found {num_bytes} with {sha256}. "
            "Restore the object from a copy of the store."
        )
