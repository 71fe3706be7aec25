"""Whether stored bytes are what a reference names, streamed: no file, whatever the size."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from storage.audit_findings import Tally
from storage.audit_tensors import TensorHasher, TensorRow
from storage.errors import NotFound
from storage.object_store import ObjectStore
from storage.records import (
    RECORD_SCHEMA_VERSION,
    ObjectRef,
    PolicyRef,
    Probe,
    Record,
    canonical_json,
    sha256_hex,
    why_invalid,
)

CHUNK_BYTES = 4 << 20
"""Read at once; what a thread of an audit holds of a large object."""

MAX_RECORD_BYTES = 64 << 20
"""No record is larger; what is there instead is not read."""

PARSE_ERRORS = (ValueError, TypeError, OverflowError, RecursionError)
"""What parsing bytes that somebody made up can raise."""

Model = TypeVar("Model", bound=Record)


@dataclass(frozen=True)
class Bench:
    """Where one part of an audit is done: the store, a listing of what is there, the tally.

    `sizes` are {key: bytes} of everything under `prefix`; `owners` {sha256: key} of what records
    name, so that swapped objects are recognised; `given_up` tells whether retention deleted a key.
    """

    store: ObjectStore
    tally: Tally
    prefix: str
    sizes: Mapping[str, int]
    given_up: Callable[[str], bool]
    owners: dict[str, str] = field(default_factory=dict[str, str])
    named: set[str] = field(default_factory=set[str])

    def size(self, key: str) -> int | None:
        """Returns how many bytes the object has, or None if it is not there."""
        if key.startswith(self.prefix):
            return self.sizes.get(key)
        try:
            return self.store.size(key)
        except NotFound:
            return None

    def say_found(self, sha256: str, num_bytes: int) -> str:
        """Returns what was found, by the name of its rightful owner if that is known."""
        owner = self.owners.get(sha256)
        return f"the bytes of {owner}" if owner else f"{num_bytes} bytes with sha256 {sha256}"


def open_bench(
    store: ObjectStore, prefix: str, tally: Tally, *, given_up: Callable[[str], bool]
) -> Bench:
    """Returns a bench for what lies under `prefix`, listed once."""
    sizes = {listed.key: listed.num_bytes for listed in store.list(prefix)}
    return Bench(store, tally, prefix, sizes, given_up)


def outside_bench(store: ObjectStore, tally: Tally) -> Bench:
    """Returns a bench for single objects, wherever they lie; nothing may be missing there."""
    return Bench(store, tally, prefix="\n", sizes={}, given_up=lambda key: False)


def record_at(
    bench: Bench, key: str, model: type[Model], *, sha256: str | None = None
) -> tuple[Model, str, bytes] | None:
    """Returns the record under `key`, its digest and its bytes, or says what is wrong with it.

    Args:
        bench: where to look and say.
        key: of the record.
        model: what it has to be.
        sha256: of its bytes; None where nothing names them.
    """
    payload = _record_bytes(bench, key, sha256)
    if payload is None:
        return None
    try:
        record = model.from_bytes(payload)
    except PARSE_ERRORS as error:
        why = why_invalid(error) if isinstance(error, ValueError) else str(error)
        bench.tally.broken(key, expected=_a(model), found=f"another text ({why})")
        return None
    version = getattr(record, "schema_version", RECORD_SCHEMA_VERSION)
    bench.tally.expect(key, "schema version", version, RECORD_SCHEMA_VERSION)
    if not is_canonical(payload):
        bench.tally.broken(key, expected="canonical JSON", found="another encoding of the record")
    return record, sha256_hex(payload), payload


def _a(model: type[Record]) -> str:
    name = model.__name__
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


def _record_bytes(bench: Bench, key: str, sha256: str | None) -> bytes | None:
    bench.named.add(key)
    expected = f"sha256 {sha256}" if sha256 else "an object"
    num_bytes = bench.size(key)
    if num_bytes is None or num_bytes > MAX_RECORD_BYTES:
        found = "no object" if num_bytes is None else f"{num_bytes} bytes"
        bench.tally.broken(key, expected=expected, found=found)
        return None
    payload = b"".join(_chunks(bench, key, num_bytes))
    bench.tally.counts["records"] += 1
    found = sha256_hex(payload)
    if sha256 and found != sha256:
        bench.tally.broken(key, expected=expected, found=bench.say_found(found, num_bytes))
        return None
    return payload


def is_canonical(payload: bytes) -> bool:
    """Tells whether `payload` is the one JSON encoding that digests are taken over."""
    try:
        value = json.loads(payload)
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8") == payload
    except (ValueError, RecursionError):
        return False


def check_object(bench: Bench, ref: ObjectRef, *, may_be_given_up: bool = False) -> None:
    """Says so if the object is missing, cut, replaced or swapped; reads it in chunks.

    Args:
        bench: where to look and say.
        ref: what its bytes must be.
        may_be_given_up: retention deletes such objects.
    """
    if _is_given_up(bench, ref, may_be_given_up=may_be_given_up) or not _has_its_size(bench, ref):
        return
    digest = hashlib.sha256()
    for chunk in _chunks(bench, ref.key, ref.num_bytes):
        digest.update(chunk)
    _has_its_digest(bench, ref, digest.hexdigest())


def check_policy(bench: Bench, policy: PolicyRef, *, key: str) -> None:
    """Says so if a file of the policy or its probe is not what it names, or its digest is wrong.

    Args:
        bench: where to look and say.
        policy: files, probe and digest.
        key: of the record that names the policy.
    """
    rows: list[TensorRow] = []
    whole = True
    for ref in policy.files:
        found = _check_policy_file(bench, ref)
        whole = whole and found is not None
        rows += found or []
    if whole and policy.files:
        rows.sort(key=lambda row: str(row[0]))
        found = sha256_hex(canonical_json(rows))
        bench.tally.expect(key, "policy digest of the files", found, policy.digest)
    if not _is_given_up(bench, policy.probe, may_be_given_up=True):
        record_at(bench, policy.probe.key, Probe, sha256=policy.probe.sha256)


def _check_policy_file(bench: Bench, ref: ObjectRef) -> list[TensorRow] | None:
    """Returns the rows of the file's tensors, or None if they cannot be told."""
    if _is_given_up(bench, ref, may_be_given_up=True) or not _has_its_size(bench, ref):
        return None
    file = TensorHasher(ref.num_bytes)
    for chunk in _chunks(bench, ref.key, ref.num_bytes):
        file.update(chunk)
    if not _has_its_digest(bench, ref, file.hexdigest()):
        return None
    rows = file.rows()
    if rows is None:
        bench.tally.broken(ref.key, expected="a safetensors file", found="something else")
    return rows


def _is_given_up(bench: Bench, ref: ObjectRef, *, may_be_given_up: bool) -> bool:
    bench.named.add(ref.key)
    there = bench.size(ref.key) is not None
    if not may_be_given_up or there or not bench.given_up(ref.key):
        return False
    bench.tally.given_up["snapshot file" if "/snapshot/" in ref.key else "policy file"] += 1
    return True


def _has_its_size(bench: Bench, ref: ObjectRef) -> bool:
    bench.named.add(ref.key)
    expected = f"{ref.num_bytes} bytes with sha256 {ref.sha256}"
    num_bytes = bench.size(ref.key)
    if num_bytes is None:
        bench.tally.broken(ref.key, expected=expected, found="no object")
    elif num_bytes != ref.num_bytes:
        bench.tally.broken(ref.key, expected=expected, found=f"{num_bytes} bytes")
    return num_bytes == ref.num_bytes


def _has_its_digest(bench: Bench, ref: ObjectRef, found: str) -> bool:
    if found != ref.sha256:
        bench.tally.broken(
            ref.key, expected=f"sha256 {ref.sha256}", found=bench.say_found(found, ref.num_bytes)
        )
    return found == ref.sha256


def _chunks(bench: Bench, key: str, num_bytes: int) -> Iterator[bytes]:
    """Yields the object in pieces; one that vanishes meanwhile ends early."""
    bench.tally.counts["objects"] += 1
    bench.tally.counts["bytes"] += num_bytes
    try:
        if num_bytes <= CHUNK_BYTES:
            yield bench.store.get(key)
            return
        for start in range(0, num_bytes, CHUNK_BYTES):
            yield bench.store.get_range(key, start, CHUNK_BYTES)
    except NotFound:
        return
