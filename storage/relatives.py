"""The runs that were forked from a run, and what of it they name."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage.errors import NotFound
from storage.layout import run_of_key, runs_prefix
from storage.ledger import first_step, head, read_commit, read_record, read_run
from storage.object_store import ObjectStore
from storage.records import ParentRef, StepCommit

_NUM_READS = 16
_CHUNK = 1000


@dataclass(frozen=True)
class Relatives:
    """The family of one run, as the run.json of the store's runs say."""

    runs: frozenset[str]
    """All runs that were looked at; a run.json never changes, so none is read twice."""
    forks: dict[int, list[str]]
    """{step: runs that were forked from it}."""
    descendants: frozenset[str]
    """The forks, their forks, and so on."""


def find_relatives(store: ObjectStore, run: str) -> Relatives:
    """Reads the run.json of every run of the store.

    Raises:
        Corrupt: one does not parse, so nobody knows whose fork it is.
    """
    parents = _parents(store, store.folders(runs_prefix()))
    forks: dict[int, list[str]] = {}
    for name, parent in sorted(parents.items()):
        if parent is not None and parent.run == run:
            forks.setdefault(parent.step, []).append(name)
    return Relatives(frozenset(parents), forks, _descendants({run}, parents))


def came_since(store: ObjectStore, run: str, relatives: Relatives) -> list[str]:
    """Returns the forks of `run`, or of its forks, that were made after `relatives` were found."""
    names = [name for name in store.folders(runs_prefix()) if name not in relatives.runs]
    return sorted(_descendants({run, *relatives.descendants}, _parents(store, names)))


def foreign_keys(store: ObjectStore, run: str, relatives: Relatives) -> set[str]:
    """Returns the objects of `run` that commits of its descendants name.

    Raises:
        Corrupt: a commit or record is changed or gone.
    """
    found: set[str] = set()
    with ThreadPoolExecutor(_NUM_READS) as pool:
        for name in sorted(relatives.descendants):
            newest = head(store, name)
            first = first_step(read_run(store, name)[0])
            last = newest[0].step if newest else first - 1
            for start in range(first, last + 1, _CHUNK):
                steps = range(start, min(start + _CHUNK, last + 1))
                commits = pool.map(lambda step, name=name: read_commit(store, name, step)[0], steps)
                found.update(key for commit in commits for key in _foreign(store, run, commit))
    return found


def _foreign(store: ObjectStore, run: str, commit: StepCommit) -> Iterator[str]:
    yield from (file.key for file in commit.policy.files if run_of_key(file.key) == run)
    for ref in commit.records:
        if run_of_key(ref.key) == run:
            record = read_record(store, ref)
            policy = record.policy.files if record.policy else []
            snapshot = record.snapshot.files.values() if record.snapshot else []
            yield from (file.key for file in [*policy, *snapshot])


def _parents(store: ObjectStore, names: Sequence[str]) -> dict[str, ParentRef | None]:
    def parent(name: str) -> tuple[str, ParentRef | None] | None:
        try:
            return name, read_run(store, name)[0].parent
        except NotFound:
            return None

    with ThreadPoolExecutor(_NUM_READS) as pool:
        return dict(found for found in pool.map(parent, names) if found is not None)


def _descendants(family: set[str], parents: dict[str, ParentRef | None]) -> frozenset[str]:
    found: set[str] = set()
    while True:
        more = {
            name
            for name, parent in parents.items()
            if parent is not None and parent.run in family | found and name not in found
        }
        if not more:
            return frozenset(found)
        found |= more
