"""What of a run may go: planned by listing and reading. Nothing is written or deleted here.

Only below committed steps that the newest one has left behind; commits, plans, records,
experience, probes and evaluations always stay. Why a sleeping writer may lose its objects to this:
whatever it still puts below such a step is named by no commit, and only commits are read.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from storage.errors import Corrupt, NotFound
from storage.layout import (
    GC_RECORD_STEPS,
    is_below_a_step,
    is_snapshot_key,
    is_snapshot_record_key,
    part_of_key,
    step_of_key,
    steps_prefix,
)
from storage.ledger import first_step, head, read_commit, read_record, read_run
from storage.object_store import Listed, ObjectStore
from storage.objects import is_there
from storage.records import GivenUp, ObjectRef, Record, StageRecord, StepCommit, why_invalid
from storage.relatives import Relatives, find_relatives, foreign_keys
from storage.retention import Rule, kept_policies, kept_snapshots

NUM_READS = 16
"""Steps looked at at once; each is a few small reads."""

Kind = Literal["policy", "snapshot", "experience", "ledger", "open"]
"""What stays: `ledger` is commits, plans and records; `open` what is not looked at: the newest
step, which the next one may still name, and uncommitted ones."""


@dataclass
class Tally:
    """How many objects, and how many bytes they have."""

    objects: int = 0
    num_bytes: int = 0

    def add(self, num_bytes: int, objects: int = 1) -> None:
        """Counts `objects` that have `num_bytes` together."""
        self.objects += objects
        self.num_bytes += num_bytes


@dataclass(frozen=True)
class Survey:
    """What is decided before any step is looked at closely."""

    run: str
    rule: Rule
    first: int
    head: int
    relatives: Relatives
    policies: Mapping[int, list[str]]
    """{step: reasons} of the policies that stay; not of those that an earlier rule gave up."""
    snapshots: Mapping[int, list[str]]
    """Likewise."""
    seen_snapshots: frozenset[int]
    """Steps whose snapshot, or a rest of it, is there; only these can be given up."""
    kept_keys: frozenset[str]
    """Files of the policies that stay, and whatever else another run names."""


@dataclass(frozen=True)
class Batch:
    """Some consecutive steps: what goes from below them, and what stays there."""

    step: int
    goes: list[GivenUp] = field(default_factory=list[GivenUp])
    stays: dict[Kind, Tally] = field(default_factory=dict[Kind, Tally])


def survey(store: ObjectStore, run: str, rule: Rule) -> Survey:
    """Decides what of `run` is kept. Reads all run.json, and all commits of its forks.

    The newest commit is settled first: what happens to the run meanwhile is beyond it.

    Raises:
        NotFound: no such run, or it has no commit yet.
        Corrupt: a commit or record of it is changed or gone, or a run.json does not parse.
    """
    record, _ = read_run(store, run)
    newest = head(store, run)
    if newest is None:
        raise NotFound(f"Run {run!r} has no commit yet. Expected one: nothing of it is garbage.")
    first, last = first_step(record), newest[0].step
    relatives = find_relatives(store, run)
    with ThreadPoolExecutor(NUM_READS) as pool:
        seen = list(_seen_snapshots(store, run, last, pool))
        snapshots = kept_snapshots(
            rule,
            snapshots=[found.step for found in seen if found.whole],
            rebased=[found.step for found in seen if found.rebased],
            forks=relatives.forks,
        )
        policies = kept_policies(
            rule, first=first, head=last, snapshots=snapshots, forks=relatives.forks
        )
        opened = pool.map(lambda step: read_commit(store, run, step)[0].policy, policies)
        files = dict(zip(policies, [policy.files for policy in opened], strict=True))
        whole = pool.map(lambda refs: all(is_there(store, ref) for ref in refs), files.values())
        there = dict(zip(policies, whole, strict=True))
    kept_keys = {file.key for refs in files.values() for file in refs}
    return Survey(
        run=run,
        rule=rule,
        first=first,
        head=last,
        relatives=relatives,
        policies={step: why for step, why in policies.items() if there[step]},
        snapshots=snapshots,
        seen_snapshots=frozenset(found.step for found in seen),
        kept_keys=frozenset(kept_keys | foreign_keys(store, run, relatives)),
    )


def plan_batches(store: ObjectStore, survey: Survey) -> Iterator[Batch]:
    """Yields what goes and what stays, a few steps at a time, in order; memory stays flat.

    What is planned may be deleted once a GcRecord names it and no fork came meanwhile
    (`relatives.came_since`). A second call plans what an interrupted one left.

    Raises:
        Corrupt: a commit or record is changed or gone; nothing of its steps was planned.
    """
    steps = _steps(store, survey.run)
    with ThreadPoolExecutor(NUM_READS) as pool:
        for start, group in groupby(steps, key=lambda item: item[0] // GC_RECORD_STEPS):
            batch = Batch(step=start * GC_RECORD_STEPS)
            plans = pool.map(lambda item: _plan_step(store, survey, *item), list(group))
            for plan in plans:
                batch.goes.extend(plan.goes)
                for kind, tally in plan.stays.items():
                    batch.stays.setdefault(kind, Tally()).add(tally.num_bytes, tally.objects)
            yield batch


def _steps(store: ObjectStore, run: str) -> Iterator[tuple[int, list[Listed]]]:
    # What somebody else put beside the steps is none of gc's business.
    listing = (entry for entry in store.list(steps_prefix(run)) if is_below_a_step(entry.key))
    for step, entries in groupby(listing, key=lambda entry: step_of_key(entry.key)):
        yield step, list(entries)


@dataclass(frozen=True)
class _SeenSnapshot:
    step: int
    whole: bool
    rebased: bool


def _seen_snapshots(
    store: ObjectStore, run: str, last: int, pool: ThreadPoolExecutor
) -> Iterator[_SeenSnapshot]:
    def look(item: tuple[int, list[Listed]]) -> _SeenSnapshot:
        step, listed = item
        commit, _ = read_commit(store, run, step)
        records = [*_named_records(store, commit, stage="train"), *_snapshot_records(store, listed)]
        there = {entry.key: entry.num_bytes for entry in listed}
        made = [record for record in records if record.snapshot and _is_whole(record, there)]
        return _SeenSnapshot(step, bool(made), any(record.rebased for record in made))

    committed = (item for item in _steps(store, run) if item[0] <= last)
    with_files = (item for item in committed if any(is_snapshot_key(e.key) for e in item[1]))
    for _, group in groupby(with_files, key=lambda item: item[0] // GC_RECORD_STEPS):
        yield from pool.map(look, list(group))


def _is_whole(record: StageRecord, there: Mapping[str, int]) -> bool:
    assert record.snapshot is not None, "only snapshots are asked about"
    return all(there.get(ref.key) == ref.num_bytes for ref in record.snapshot.files.values())


def _plan_step(store: ObjectStore, survey: Survey, step: int, listed: list[Listed]) -> Batch:
    batch = Batch(step=step)
    if not survey.first <= step < survey.head:
        batch.stays["open"] = Tally(len(listed), sum(entry.num_bytes for entry in listed))
        return batch
    attempts = any(part_of_key(entry.key) == "attempt" for entry in listed)
    named = _named_objects(store, survey, step, listed) if attempts else {}
    for entry in listed:
        kind, ref = named.get(entry.key, (None, None))
        if part_of_key(entry.key) != "attempt":
            kind = "ledger"
        why = _why_it_goes(survey, step, entry.key, kind)
        if why is None:
            batch.stays.setdefault(kind or "policy", Tally()).add(entry.num_bytes)
            continue
        batch.goes.append(
            GivenUp(
                key=entry.key,
                kind=kind if kind in ("policy", "snapshot") else "unreferenced",
                num_bytes=entry.num_bytes,
                sha256=ref.sha256 if ref else None,
                why=why,
            )
        )
    return batch


def _why_it_goes(survey: Survey, step: int, key: str, kind: Kind | None) -> str | None:
    rule = survey.rule
    if key in survey.kept_keys:
        return None
    if kind is None:
        return "no commit names it"
    if kind == "policy":
        return f"none of the last {rule.policies_last}, of every {rule.policies_every}, or pinned"
    if kind == "snapshot" and step in survey.seen_snapshots and step not in survey.snapshots:
        return f"none of the last {rule.snapshots_last} or of every {rule.snapshots_every}"
    return None


def _named_objects(
    store: ObjectStore, survey: Survey, step: int, listed: list[Listed]
) -> dict[str, tuple[Kind, ObjectRef]]:
    """Returns what the step's commit names of its attempts, and what snapshot records name.

    Every reference in a record counts, of whatever field: only what is known to be a policy's or a
    snapshot's file can be given up.
    """
    commit, _ = read_commit(store, survey.run, step)
    records = [*_named_records(store, commit), *_snapshot_records(store, listed)]
    named: dict[str, tuple[Kind, ObjectRef]] = {
        ref.key: ("experience", ref) for record in records for ref in _refs(record)
    }
    for record in records:
        policy = record.policy.files if record.policy else []
        snapshot = record.snapshot.files.values() if record.snapshot else []
        kept = {ref.key for ref in record.outputs.values()}
        named |= {ref.key: ("policy", ref) for ref in policy if ref.key not in kept}
        named |= {ref.key: ("snapshot", ref) for ref in snapshot if ref.key not in kept}
    return named


def _named_records(
    store: ObjectStore, commit: StepCommit, *, stage: str | None = None
) -> Iterator[StageRecord]:
    for ref in commit.records:
        if stage is None or ref.stage == stage:
            yield read_record(store, ref)


def _snapshot_records(store: ObjectStore, listed: list[Listed]) -> Iterator[StageRecord]:
    """Yields the records of snapshots made after the step, whether or not the next one names them.

    Restoring finds them by their request, so they are snapshots like any other.
    """
    for entry in listed:
        if is_snapshot_record_key(entry.key):
            payload = store.get(entry.key)
            try:
                yield StageRecord.from_bytes(payload)
            except ValueError as error:
                raise Corrupt(
                    f"{entry.key} is not a StageRecord: {why_invalid(error)}. Restore it from a "
                    "copy of the store."
                ) from error


def _refs(value: object) -> Iterator[ObjectRef]:
    if isinstance(value, ObjectRef):
        yield value
    elif isinstance(value, Record):
        for name in type(value).model_fields:
            yield from _refs(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _refs(item)
