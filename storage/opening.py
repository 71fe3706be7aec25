"""Opens a store, and refuses one that cannot keep one history.

Knows no vendor: what a scheme means is the backend's.
"""

import logging
import uuid
from contextlib import suppress

from storage.backends import BACKENDS
from storage.backends.local import create_directory
from storage.backends.s3 import create_bucket as create_s3_bucket
from storage.errors import AlreadyExists, CommitConflict, StorageError, Unsuitable
from storage.layout import probe_prefix, runs_prefix
from storage.object_store import ObjectStore
from storage.store_config import StoreConfig

_log = logging.getLogger(__name__)

STALE_AFTER_S = 3600.0
"""An unfinished upload this old belongs to a dead writer; a living one takes minutes."""


def open_store(config: StoreConfig, *, writing: bool) -> ObjectStore:
    """Returns the store at `config.uri`.

    Opening for writing writes and deletes a few objects under `probes/` to see that conditional
    puts hold, and drops unfinished uploads older than an hour. It makes a directory, but never a
    bucket. Opening for reading writes nothing.

    Raises:
        Unavailable: not reachable, wrong credentials, no such bucket or directory.
        Unsuitable: the store lets two writers win.
    """
    if writing and config.scheme == "file":
        create_directory(config)
    store = BACKENDS[config.scheme](config)
    # Some servers make a bucket at the first put: look before writing, so that a typo shows.
    next(iter(store.list(runs_prefix())), None)
    if writing:
        probe(store)
        sweep(store, "", older_than_s=STALE_AFTER_S)
    return store


def sweep(store: ObjectStore, prefix: str, *, older_than_s: float) -> None:
    """Drops unfinished uploads under `prefix` that are older than that; never raises for one.

    What is left unfinished costs space only, so keys that may not list it are good enough.
    """
    try:
        store.sweep(prefix, older_than_s=older_than_s)
    except StorageError as error:
        _log.info("Unfinished uploads in %s were not looked for: %s", store.uri, error)


def create_bucket(config: StoreConfig) -> None:
    """Makes the place that `config` names: the bucket, or the directory. A second call is fine.

    Raises:
        Unavailable: not reachable, or not allowed.
    """
    if config.scheme == "s3":
        create_s3_bucket(config)
    elif config.scheme == "file":
        create_directory(config)


def probe(store: ObjectStore) -> None:
    """Creates an object twice and replaces it with a stale etag; both must be refused.

    Raises:
        Unsuitable: one of them was not.
    """
    key = f"{probe_prefix()}{uuid.uuid4().hex}"
    try:
        _probe_key(store, key)
    except StorageError:
        # It may be there, and what failed is what has to be told.
        with suppress(StorageError):
            store.delete(key)
        raise
    store.delete(key)


def _probe_key(store: ObjectStore, key: str) -> None:
    first = store.put_if_absent(key, b"first")
    if _creates(store, key):
        raise _unsuitable(store, "created the same object twice (it ignores If-None-Match)")
    second = store.put_if_match(key, b"second", first)
    if _replaces(store, key, first):
        raise _unsuitable(store, "replaced an object by a stale etag (it ignores If-Match)")
    if store.get_with_etag(key) != (b"second", second):
        raise _unsuitable(store, "did not give back what was written last")


def _creates(store: ObjectStore, key: str) -> bool:
    try:
        store.put_if_absent(key, b"again")
    except AlreadyExists:
        return False
    return True


def _replaces(store: ObjectStore, key: str, stale: str) -> bool:
    try:
        store.put_if_match(key, b"third", stale)
    except CommitConflict:
        return False
    return True


def _unsuitable(store: ObjectStore, what: str) -> Unsuitable:
    return Unsuitable(
        f"{store.uri} {what}. Expected a refusal: without it two controllers could both commit a "
        "step. Use a store with conditional puts, such as AWS S3, MinIO, SeaweedFS or a directory."
    )
