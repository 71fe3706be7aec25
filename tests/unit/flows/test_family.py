"""The tree of forks that `show` draws, and what a fork knows of its parents."""

import uuid
from dataclasses import replace

from rich.console import Console
from rich.tree import Tree

from flows.family import family_tree
from flows.show import known_evals
from storage.backends.memory import MemoryStore
from storage.records import ParentRef
from tests.contract import complete_run


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


def test_a_fork_of_other_held_out_prompts_knows_none_of_its_parents_evaluations():
    store = MemoryStore(uuid.uuid4().hex)
    parent = complete_run.write_run(store, 1)
    measured = complete_run.write_eval(store, parent)
    complete_run.write_fork(store, parent, run="same", steps=0)
    prompts = parent.run.prompts
    held_out = prompts.held_out.model_copy(update={"sha256": "e" * 64})
    others = prompts.model_copy(update={"held_out": held_out})
    changed = replace(parent, run=parent.run.model_copy(update={"prompts": others}))
    complete_run.write_fork(store, changed, run="other", steps=0)
    assert known_evals(store, "same") == [measured]
    assert known_evals(store, "other") == []
