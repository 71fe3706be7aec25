"""What a run rests on: itself, the runs that it was forked from, and the inputs of them all."""

from collections.abc import Callable
from dataclasses import dataclass

from storage.audit_findings import Tally
from storage.audit_objects import check_object, outside_bench, record_at
from storage.audit_steps import Audited, note_strangers
from storage.layout import check_run_name, input_key, run_key, run_prefix, steps_prefix
from storage.ledger import first_step, read_run
from storage.object_store import ObjectStore
from storage.records import ParentRef, RunRecord, input_digest
from storage.signing import PublicKey


@dataclass(frozen=True)
class Segment:
    """Steps [`first`, `last`] of one run; `last` None: to its end.

    `parent` is the run that it was forked from, `looked_at_from` the first step that the audit
    looks at whole.
    """

    audited: Audited
    first: int
    last: int | None
    parent: Audited | None = None
    looked_at_from: int = 0


def find_segments(
    store: ObjectStore,
    run: str,
    *,
    key: PublicKey | None,
    given_up: Callable[[str], bool],
    tally: Tally,
) -> list[Segment]:
    """Returns the run and those that it descends from, itself first, as far as they can be read.

    A signature is asked of the run's own commits: those of a parent are sealed by the digest in
    the first of them.

    Raises:
        NotFound: there is no such run.
    """
    found: list[Audited] = []
    ends: list[ParentRef | None] = [None]
    name: str | None = run
    while name is not None:
        record = _run_at(store, name, tally, is_asked=not found)
        if record is None:
            break
        own_key = key if not found else None
        found.append(Audited(store, record[0], record[1], own_key, given_up))
        parent = record[0].parent
        name = parent.run if parent else None
        if any(name == audited.run.run for audited in found):
            expected = "a parent that is not among its own descendants"
            tally.broken(run_key(found[-1].run.run), expected=expected, found=f"{name}")
            name = None
        ends.append(parent)
    return [
        Segment(
            audited=audited,
            first=first_step(audited.run),
            last=end.step if end else None,
            parent=found[index + 1] if index + 1 < len(found) else None,
        )
        for index, (audited, end) in enumerate(zip(found, ends, strict=False))
    ]


def _run_at(
    store: ObjectStore, run: str, tally: Tally, *, is_asked: bool
) -> tuple[RunRecord, str] | None:
    """Returns a run's record and its digest, or says why there is none.

    Raises:
        NotFound: it is the run that was asked for, and nothing of it is there.
    """
    bench = outside_bench(store, tally)
    key = run_key(check_run_name(run))
    if is_asked and next(iter(store.list(run_prefix(run))), None) is None:
        read_run(store, run)
    found = record_at(bench, key, RunRecord)
    if found is None or not tally.expect(key, "run", found[0].run, run):
        return None
    return found[0], found[1]


def step_numbers(audited: Audited, tally: Tally) -> list[int]:
    """Returns the steps that anything lies under, in order; says which folders are no steps."""
    prefix = steps_prefix(audited.run.run)
    found: list[int] = []
    strangers: list[str] = []
    for name in audited.store.folders(prefix):
        if not name.isdecimal():
            strangers.append(f"{prefix}{name}/")
        elif f"{int(name):08d}" == name:
            found.append(int(name))
        else:
            expected = f"no such folder: step {int(name)} is written {int(name):08d}"
            tally.broken(f"{prefix}{name}/", expected=expected, found="one that reads like a step")
    note_strangers(tally, strangers)
    return sorted(found)


def audit_inputs(segment: Segment) -> Tally:
    """Returns what is wrong with the prompts and model files that a run was launched with."""
    tally = Tally()
    audited = segment.audited
    bench = outside_bench(audited.store, tally)
    run, key = audited.run, run_key(audited.run.run)
    files = {name: ref.sha256 for name, ref in run.model.files.items()}
    tally.expect(key, "digest of the model's files", input_digest(files), run.model.digest)
    prompts = {"train.parquet": run.prompts.train, "held_out.parquet": run.prompts.held_out}
    digest = input_digest({name: ref.sha256 for name, ref in prompts.items()})
    named = [(run.model.digest, run.model.files), (digest, prompts)]
    refs = [(input_key(of, name), ref) for of, found in named for name, ref in found.items()]
    bench.owners.update({ref.sha256: ref.key for _, ref in refs})
    for expected, ref in refs:
        tally.expect(key, "key of an input", ref.key, expected)
        check_object(bench, ref)
    for name, rows in _promised_rows(run).items():
        tally.expect(key, f"rows of {name}", prompts[name].rows, rows)
    return tally


def _promised_rows(run: RunRecord) -> dict[str, int]:
    """Returns how many prompts the sets of a run have together."""
    sets = run.prompts.sets
    return {
        "train.parquet": sum(found.train_rows for found in sets),
        "held_out.parquet": sum(found.held_out_rows for found in sets),
    }
