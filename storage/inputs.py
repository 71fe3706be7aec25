"""Content-addressed sets of files: tokenizers, configs, reference policies."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from storage.errors import Corrupt, NotFound
from storage.layout import input_key
from storage.object_store import ObjectStore
from storage.objects import fetch_file, file_sha256, link_directory
from storage.records import InputRef, ObjectRef, input_digest

NUM_TRANSFERS = 4
"""Files in flight at once."""


def put_input(store: ObjectStore, files: Mapping[str, Path]) -> InputRef:
    """Stores `files` (name -> path) under the digest of their names and contents.

    Idempotent: what is there already is not sent again, whoever stored it.

    Raises:
        ValueError: no files, or a name that could leave the directory.
    """
    if not files:
        raise ValueError("An input needs at least one file, got none.")
    digests = {_checked(name): file_sha256(path) for name, path in files.items()}
    digest = input_digest(digests)
    refs = {
        name: ObjectRef(
            key=input_key(digest, name), sha256=digests[name], num_bytes=path.stat().st_size
        )
        for name, path in files.items()
    }
    with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
        list(pool.map(lambda name: _upload(store, refs[name], files[name]), files))
    return InputRef(digest=digest, files=refs)


def open_input(store: ObjectStore, ref: InputRef, *, cache: Path) -> Path:
    """Returns a directory with the files under their names, each checked. Read, never write.

    Raises:
        NotFound: a file is gone.
        Corrupt: a file, or the set, is not what its digest names.
    """
    found = input_digest({_checked(name): file.sha256 for name, file in ref.files.items()})
    if found != ref.digest:
        raise Corrupt(
            f"Input {ref.digest} names files whose digest is {found}. Expected them to be equal: "
            "the record that names it was changed."
        )
    with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
        paths = pool.map(lambda file: fetch_file(store, file, cache=cache), ref.files.values())
        files = dict(zip(ref.files, paths, strict=True))
    directory = cache / "inputs" / ref.digest
    directory.parent.mkdir(parents=True, exist_ok=True)
    return link_directory(directory, files)


def _upload(store: ObjectStore, ref: ObjectRef, path: Path) -> None:
    if _stored_size(store, ref.key) != ref.num_bytes:
        store.upload(ref.key, path)


def _stored_size(store: ObjectStore, key: str) -> int | None:
    try:
        return store.size(key)
    except NotFound:
        return None


def _checked(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or str(path) != name:
        raise ValueError(f"{name!r} cannot name a file of an input. Expected a relative path.")
    return name
