"""Gives up what no commit names and what retention does not keep; DESIGN.md section 3."""

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from flows.changes import config_as_of, newest_plan
from flows.config import RunConfig
from flows.overrides import with_overrides
from storage.errors import CommitConflict
from storage.garbage import Batch, Survey, Tally, plan_batches, survey
from storage.layout import gc_key
from storage.ledger import head, read_run
from storage.object_store import ObjectStore
from storage.records import GcRecord, Record
from storage.relatives import came_since
from storage.retention import Rule

log = logging.getLogger(__name__)

NUM_DELETES = 16


class GcReport(Record):
    """What goes, or went, and what stays: by kind, and step by step for policies and snapshots."""

    run: str
    store: str
    first: int
    head: int
    deleted: bool
    rule: Rule
    goes: dict[str, Tally]
    stays: dict[str, Tally]
    policies: dict[int, list[str]]
    snapshots: dict[int, list[str]]
    forks: dict[int, list[str]]
    records: list[str]
    """The GcRecords that were put."""


def plan_gc(
    store: ObjectStore, run: str, *, rule: Rule, say: Callable[[str], object] = log.info
) -> GcReport:
    """Returns what `run_gc` would delete. Only reads.

    Args:
        store: holds the run.
        run: its name.
        rule: what is kept; `retention_rule` returns the run's own.
        say: told how far it is.

    Raises:
        NotFound: no such run, or it has no commit.
        Corrupt: the run is damaged; `rollbook verify` says where.
    """
    found = survey(store, run, rule)
    return _report(store, found, plan_batches(store, found), say=say)


def run_gc(
    store: ObjectStore, run: str, *, rule: Rule, say: Callable[[str], object] = log.info
) -> GcReport:
    """Deletes what `plan_gc` names, after saying so in GcRecords. See there for the rest.

    Safe beside controllers, forks and other gcs; after an interruption a second call goes on.

    Raises:
        CommitConflict: a fork was made meanwhile; what it may need was not deleted.
        CommitUnknown: a GcRecord's put was not answered; nothing that it names was deleted.
    """
    found = survey(store, run, rule)
    records: list[str] = []

    def given_up() -> Iterator[Batch]:
        for batch in plan_batches(store, found):
            if batch.goes:
                records.append(_give_up(store, found, batch))
            yield batch

    report = _report(store, found, given_up(), say=say)
    return report.model_copy(update={"deleted": True, "records": records})


def retention_rule(store: ObjectStore, run: str, overrides: Sequence[str] = ()) -> Rule:
    """Returns the retention of a run: of its newest plan, changed by `overrides`.

    Raises:
        NotFound: there is no such run.
        ValueError: an override is of something else, or does not fit.
    """
    strange = [text for text in overrides if not text.strip().startswith("retention.")]
    if strange:
        raise ValueError(
            f"--set {strange[0]} is no setting of gc. Expected retention.key=value, such as "
            "retention.policies_every=50."
        )
    config = with_overrides(_newest_config(store, run), overrides)
    keep = config.retention
    return Rule(
        policies_last=keep.policies_last,
        policies_every=keep.policies_every or config.evaluate.every,
        snapshots_last=keep.snapshots_last,
        snapshots_every=keep.snapshots_every,
        pinned=list(keep.pinned),
    )


def _newest_config(store: ObjectStore, run: str) -> RunConfig:
    record, _ = read_run(store, run)
    newest = head(store, run)
    return config_as_of(record, newest_plan(store, record, newest[0] if newest else None))


def _give_up(store: ObjectStore, found: Survey, batch: Batch) -> str:
    """Says what is given up, looks whether a fork needs it after all, then deletes it.

    A fork is made in the other order: it puts its run.json, then looks at what is said here. So
    either it is seen here, or it sees this and refuses, however long anybody is paused.
    """
    record = GcRecord(
        run=found.run,
        head=found.head,
        rule=found.rule.model_dump(mode="json"),
        objects=batch.goes,
        attempt=uuid.uuid4().hex,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    key = gc_key(found.run, batch.step, record.content_digest())
    store.put_if_absent(key, record.to_bytes())
    forks = came_since(store, found.run, found.relatives)
    if forks:
        store.delete(key)
        raise CommitConflict(
            f"Run {found.run!r} was forked as {', '.join(forks)} while gc was at step "
            f"{batch.step}. Expected no new fork, which may need what was about to go. Nothing "
            f"from there on was deleted; `rollbook gc {found.run}` looks again."
        )
    with ThreadPoolExecutor(NUM_DELETES) as pool:
        for _ in pool.map(lambda gone: store.delete(gone.key), batch.goes):
            pass
    return key


def _report(
    store: ObjectStore, found: Survey, batches: Iterator[Batch], *, say: Callable[[str], object]
) -> GcReport:
    goes: dict[str, Tally] = {}
    stays: dict[str, Tally] = {}
    for batch in batches:
        for gone in batch.goes:
            goes.setdefault(gone.kind, Tally()).add(gone.num_bytes)
        for kind, tally in batch.stays.items():
            stays.setdefault(kind, Tally()).add(tally.num_bytes, tally.objects)
        say(f"gc of {found.run}: step {batch.step} of {found.head}")
    return GcReport(
        run=found.run,
        store=store.uri,
        first=found.first,
        head=found.head,
        deleted=False,
        rule=found.rule,
        goes=goes,
        stays=stays,
        policies=dict(found.policies),
        snapshots=dict(found.snapshots),
        forks=found.relatives.forks,
        records=[],
    )
