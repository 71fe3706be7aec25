"""Two runs are compared from the general to the particular, down to the stage that differs."""

import uuid
from typing import Any

import pytest

from flows.diff import changes, diff_runs
from flows.diff_report import diff_lines
from storage.backends.memory import MemoryStore
from storage.ledger import create_run
from storage.object_store import ObjectStore
from tests.contract.records import run_record
from tests.contract.synthetic_runs import SyntheticRun


@pytest.fixture
def store() -> ObjectStore:
    return MemoryStore(uuid.uuid4().hex)


def run(store: ObjectStore, name: str, **how: Any) -> SyntheticRun:
    return SyntheticRun(store, name, snapshots_every=0, **how)


def test_nested_settings_are_named_by_dotted_keys() -> None:
    a = {"train": {"rate": 1, "betas": [1, 2]}, "seed": 0}
    b = {"train": {"rate": 2, "betas": [1, 3]}, "seed": 0, "new": None, "more": {}}
    assert [(c.name, c.a, c.b) for c in changes(a, b)] == [
        ("more", None, {}),
        ("train.betas", [1, 2], [1, 3]),
        ("train.rate", 1, 2),
    ]


def test_equal_runs_say_so(store: ObjectStore) -> None:
    run(store, "a").steps(3)
    run(store, "b").steps(3)
    assert diff_lines(diff_runs(store, "a", "b")) == [
        "launched with equal settings, model and prompts",
        "a and b are equal: the same policies from step 0 to 3",
    ]


def test_a_run_that_goes_on_longer_is_equal_as_far_as_both_go(store: ObjectStore) -> None:
    run(store, "a").steps(3)
    run(store, "b").steps(5)
    assert diff_lines(diff_runs(store, "a", "b"))[-1].endswith("to 3; b goes on to step 5")


def test_the_first_stage_with_other_results_is_named_with_what_was_asked(
    store: ObjectStore,
) -> None:
    a, b = run(store, "a").steps(2), run(store, "b").steps(2)
    a.step()
    b.settings = {"reward-0000": {"weight": 2}, "train": {"rewards": "those"}}
    b.step()
    found = diff_runs(store, "a", "b").parting
    assert found is not None
    assert (found.step, found.stage) == (3, "reward-0000")
    assert [(c.name, c.a, c.b) for c in found.request] == [("weight", None, 2)]
    assert found.environment == []


def test_a_library_version_is_named(store: ObjectStore) -> None:
    a, b = run(store, "a").step(), run(store, "b")
    b.environment = {"python": "3.12"}
    b.noise = {"train": "another rounding"}
    b.step()
    said = diff_lines(diff_runs(store, "a", "b"))
    assert a.step == 1
    assert "step 1 is the first that differs, in train" in said
    assert "  python: 3.11 | 3.12" in said


def test_other_bits_from_the_same_request_are_said_as_such(store: ObjectStore) -> None:
    run(store, "a").step()
    run(store, "b", noise={"train": "cosmic ray"}).step()
    said = diff_lines(diff_runs(store, "a", "b"))
    assert "step 0 is the first that differs, in train" in said
    assert "asked the same in the same environment: this stage gave other bits" in said


def test_a_changed_plan_is_named(store: ObjectStore) -> None:
    a, b = run(store, "a").steps(1), run(store, "b").steps(1)
    b.configs = {"train": {"learning_rate": 2}}
    b.settings = {"train": {"learning_rate": 2}}
    a.step()
    b.step()
    found = diff_runs(store, "a", "b").parting
    assert found is not None
    assert [(c.name, c.a, c.b) for c in found.plan] == [
        ("configs.train", None, {"learning_rate": 2})
    ]


def test_launch_settings_are_compared_before_any_step(store: ObjectStore) -> None:
    create_run(store, run_record("a"))
    changed = {"steps": 4, "train": {"learning_rate": 1}}
    create_run(store, run_record("b").model_copy(update={"config": changed}))
    said = diff_lines(diff_runs(store, "a", "b"))
    assert "  steps: 3 | 4" in said
    assert said[-1] == "one of them has no commit yet: there are no steps to compare"


def test_the_common_history_of_forks_is_named_first(store: ObjectStore) -> None:
    a = run(store, "a").steps(4)
    fork = run(store, "f", parent=(a, 2))
    sibling = run(store, "g", parent=(a, 3))
    fork.settings = {"train": {"learning_rate": 2}}
    fork.steps(2)
    sibling.steps(2)
    said = diff_lines(diff_runs(store, "f", "a"))
    assert said[0] == "steps up to 2 are the same commits, of run a"
    assert "step 3 is the first that differs, in train" in said
    assert diff_runs(store, "f", "g").shared == 2
    found = diff_runs(store, "a", "g")
    assert (found.shared, found.owner, found.parting) == (3, "a", None)
