"""What retention gave up: told apart from what is lost, by the GcRecords that `gc` left."""

from collections.abc import Iterator

from storage.errors import Corrupt, NotFound
from storage.layout import gc_prefix, gc_steps_prefix, run_of_key, step_of_key
from storage.ledger import first_step, read_commit, read_run
from storage.object_store import ObjectStore
from storage.objects import is_there
from storage.records import GcRecord, GivenUp, ObjectRef, StepCommit, why_invalid


def given_up(store: ObjectStore, run: str) -> Iterator[GivenUp]:
    """Yields all that `gc` ever gave up in a run, by step; an object may come more than once.

    Raises:
        Corrupt: a GcRecord does not parse.
    """
    yield from _objects(store, gc_prefix(run))


def find_given_up(store: ObjectStore, ref: ObjectRef) -> GivenUp | None:
    """Returns what `gc` said of an object of a step, or None if it never gave it up.

    Raises:
        Corrupt: a GcRecord does not parse.
    """
    prefix = gc_steps_prefix(run_of_key(ref.key), step_of_key(ref.key))
    return next((found for found in _objects(store, prefix) if found.key == ref.key), None)


def check_policy_kept(store: ObjectStore, commit: StepCommit) -> None:
    """Checks that the policy files of a commit are there, and that no gc may be deleting them.

    A fork calls this after its run.json is put and before its first commit: a gc that decided
    earlier is seen here, and one that decides later sees the run.json. So neither needs the other
    to be alive.

    Raises:
        NotFound: retention gave the policy up, or its files are lost; the message says which, and
            how to get the policy back.
    """
    for ref in commit.policy.files:
        found = find_given_up(store, ref)
        if found is not None:
            raise NotFound(
                f"Policy version {commit.policy_version} of run {commit.run!r} was given up by "
                f"retention: {found.why}. {_how_back(store, commit)}"
            )
    missing = [ref.key for ref in commit.policy.files if not is_there(store, ref)]
    if missing:
        raise NotFound(
            f"{missing[0]} is not in {store.uri}, and no gc gave it up. Expected the files of "
            f"policy version {commit.policy_version} of run {commit.run!r}. Restore it from a copy "
            "of the store."
        )


def nearest_kept(store: ObjectStore, run: str, step: int) -> int | None:
    """Returns the newest step of `run` at or below `step` whose policy files are all there."""
    first = first_step(read_run(store, run)[0])
    return next(
        (
            below
            for below in range(step, first - 1, -1)
            if all(is_there(store, ref) for ref in read_commit(store, run, below)[0].policy.files)
        ),
        None,
    )


def _how_back(store: ObjectStore, commit: StepCommit) -> str:
    kept = nearest_kept(store, commit.run, commit.step)
    if kept is None:
        return "Restore an older one from a copy of the store."
    return (
        f"Step {kept} is the nearest before it that is kept, and its successors come back by "
        f"replay: `rollbook fork {commit.run}@{kept} --run NEW`, then `rollbook resume NEW --steps "
        f"{commit.step - kept}`. To keep a step for good, name it in retention.pinned."
    )


def _objects(store: ObjectStore, prefix: str) -> Iterator[GivenUp]:
    for entry in store.list(prefix):
        yield from _parse(entry.key, store.get(entry.key)).objects


def _parse(key: str, payload: bytes) -> GcRecord:
    try:
        return GcRecord.from_bytes(payload)
    except ValueError as error:
        raise Corrupt(
            f"{key} is not a GcRecord: {why_invalid(error)}. Restore it from a copy of the store."
        ) from error
