"""The tree of forks that `show` draws."""

from rich.console import Console
from rich.tree import Tree

from flows.family import family_tree
from storage.records import ParentRef


def ref(run: str, step: int) -> ParentRef:
    return ParentRef(run=run, step=step, sha256="0" * 64)


def drawn(tree: Tree | None) -> list[str]:
    assert tree is not None
    console = Console(width=60)
    with console.capture() as capture:
        console.print(tree)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_family_is_drawn_from_its_oldest_ancestor_with_forks_in_step_order():
    parents = {"a": None, "d": ref("a", 9), "b": ref("a", 2), "c": ref("b", 4), "x": None}
    assert drawn(family_tree(parents, "c")) == [
        "a",
        "├── b  from step 2",
        "│   └── c  from step 4",
        "└── d  from step 9",
    ]


def test_a_run_alone_has_no_tree():
    assert family_tree({"a": None, "b": None}, "a") is None


def test_runs_that_claim_each_other_end():
    parents = {"a": ref("b", 1), "b": ref("a", 1)}
    assert len(drawn(family_tree(parents, "a"))) == 2
