"""Which runs were forked from which: the tree that `rollbook show` draws."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from rich.text import Text
from rich.tree import Tree

from storage.errors import StorageError
from storage.ledger import list_runs, read_run
from storage.object_store import ObjectStore
from storage.records import ParentRef

_READERS = 16


def read_parents(store: ObjectStore) -> dict[str, ParentRef | None]:
    """Returns every run of the store with the commit that it left from; one read per run.

    A run whose run.json cannot be read is left out: it is none of the asked one's business.
    """

    def parent(run: str) -> tuple[str, ParentRef | None] | None:
        try:
            return run, read_run(store, run)[0].parent
        except StorageError:
            return None

    with ThreadPoolExecutor(_READERS) as pool:
        return dict(found for found in pool.map(parent, list_runs(store)) if found)


def family_tree(parents: Mapping[str, ParentRef | None], run: str) -> Tree | None:
    """Returns the tree of all runs that share the oldest ancestor of `run`; None if it is alone."""
    root = _root(parents, run)
    tree = _grow(Tree(_label(root, None, run)), parents, root, run=run, seen={root})
    return tree if tree.children else None


def _root(parents: Mapping[str, ParentRef | None], run: str) -> str:
    seen = {run}
    while (parent := parents.get(run)) is not None and parent.run not in seen:
        run = parent.run
        seen.add(run)
    return run


def _grow(
    tree: Tree, parents: Mapping[str, ParentRef | None], above: str, *, run: str, seen: set[str]
) -> Tree:
    children = [
        (parent.step, name)
        for name, parent in parents.items()
        if parent is not None and parent.run == above and name not in seen
    ]
    for step, name in sorted(children):
        branch = tree.add(_label(name, step, run))
        _grow(branch, parents, name, run=run, seen={*seen, name})
    return tree


def _label(name: str, step: int | None, run: str) -> Text:
    text = Text(name, style="bold" if name == run else "")
    return text if step is None else text.append(f"  from step {step}", style="dim")
