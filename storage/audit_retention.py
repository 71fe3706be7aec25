"""What retention may have deleted: policies and snapshots that a sound GcRecord names."""

from collections.abc import Callable
from functools import lru_cache

from storage.audit_findings import Tally
from storage.audit_objects import open_bench, record_at
from storage.layout import (
    commit_key,
    gc_key,
    gc_prefix,
    gc_steps_prefix,
    part_of_key,
    run_of_key,
    step_of_key,
)
from storage.object_store import ObjectStore
from storage.objects import exists
from storage.records import GcRecord

KINDS = ("policy", "snapshot")
"""What commits name and retention gives up; experience and records never are."""

CACHED_PREFIXES = 64
"""Groups of steps whose GcRecords are remembered: memory stays flat over a long run."""


def retention_of(store: ObjectStore) -> Callable[[str], bool]:
    """Returns a function that tells whether retention gave up the object under a key.

    Not what it always keeps: the objects of genesis and of the newest step, which must be a
    committed one. So whoever deletes more than the rule allows cannot excuse it with a GcRecord.
    """

    @lru_cache(maxsize=CACHED_PREFIXES)
    def is_committed(run: str, step: int) -> bool:
        return exists(store, commit_key(run, step))

    @lru_cache(maxsize=CACHED_PREFIXES)
    def named(prefix: str) -> frozenset[str]:
        bench = open_bench(store, prefix, Tally(), given_up=lambda key: False)
        found = [record_at(bench, key, GcRecord) for key in bench.sizes]
        return frozenset(
            given.key
            for record in found
            if record is not None and is_committed(record[0].run, record[0].head)
            for given in record[0].objects
            if given.kind in KINDS and _is_old(given.key, head=record[0].head)
        )

    def is_given_up(key: str) -> bool:
        if part_of_key(key) != "attempt":
            return False
        return key in named(gc_steps_prefix(run_of_key(key), step_of_key(key)))

    return is_given_up


def _is_old(key: str, *, head: int) -> bool:
    return part_of_key(key) == "attempt" and 0 < step_of_key(key) < head


def audit_retention(store: ObjectStore, run: str) -> Tally:
    """Returns which GcRecords of a run are not what they were: their keys name their digests."""
    tally = Tally()
    bench = open_bench(store, gc_prefix(run), tally, given_up=lambda key: False)
    for key in bench.sizes:
        found = record_at(bench, key, GcRecord)
        if found is None:
            continue
        record, digest, _ = found
        tally.expect(key, "run", record.run, run)
        if not exists(store, commit_key(run, record.head)):
            tally.broken(
                key,
                expected=f"the commit of step {record.head}, which was the newest when gc ran",
                found="none: it, and what followed, was deleted, or this record is made up",
            )
        steps = {step_of_key(given.key) for given in record.objects if part_of_key(given.key)}
        keys = {gc_key(run, step, digest) for step in steps} or {gc_key(run, 0, digest)}
        tally.expect(key, "key", {key}, keys)
        tally.counts["gc records"] += 1
    return tally
