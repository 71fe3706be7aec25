"""Which retention counts, and how a report reads."""

import uuid
from typing import Any

import pytest

from flows.gc import plan_gc, retention_rule
from flows.gc_report import lines
from flows.overrides import with_overrides
from flows.recipes import RECIPES
from storage.backends.memory import MemoryStore
from storage.ledger import create_run
from tests.contract.records import run_record
from tests.contract.synthetic_runs import SyntheticRun


def configs(*changes: str) -> dict[str, Any]:
    return with_overrides(RECIPES["addition"](), changes).model_dump(mode="json")


def store_of(*changes: str) -> MemoryStore:
    """A store with run `r`: launched with the recipe's retention, its plans made with `changes`."""
    store = MemoryStore(uuid.uuid4().hex)
    create_run(store, run_record().model_copy(update={"config": configs()}))
    return store


def test_the_newest_plan_says_what_is_kept() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    SyntheticRun(store, configs=configs("retention.policies_every=7", "retention.pinned=[3]"))
    rule = retention_rule(store, "r")
    assert (rule.policies_every, rule.pinned) == (7, [3])


def test_every_evaluated_policy_stays_by_default() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    SyntheticRun(store, configs=configs("evaluate.every=13"))
    assert retention_rule(store, "r").policies_every == 13


def test_a_call_may_ask_for_another_retention_and_for_nothing_else() -> None:
    store = store_of()
    rule = retention_rule(store, "r", ["retention.policies_every=3", "retention.snapshots_last=4"])
    assert (rule.policies_every, rule.snapshots_last) == (3, 4)
    with pytest.raises(ValueError, match=r"steps=3 is no setting of gc.*retention\.key=value"):
        retention_rule(store, "r", ["steps=3"])
    with pytest.raises(ValueError, match="policies_last"):
        retention_rule(store, "r", ["retention.policies_last=1"])


def test_a_report_says_what_stays_why_and_which_command_deletes() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    SyntheticRun(store, snapshots_every=0, configs=configs()).steps(45)
    rule = retention_rule(store, "r", ["retention.policies_every=4"])
    said = lines(plan_gc(store, "r", rule=rule), ["--store", "DIR"])
    assert "policies that stay, every 4: 0, 4, 8, 12 ... 32, 36, 40, 44 (12 steps)" in said
    assert "policies that stay, the last 2: 44, 45" in said
    assert "snapshots that stay, genesis: 0" in said
    assert "gc r --delete --store DIR` deletes 33 objects" in said[-1]


def test_a_report_of_a_clean_run_says_so() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    SyntheticRun(store, configs=configs()).step()
    said = lines(plan_gc(store, "r", rule=retention_rule(store, "r")), [])
    assert said[-1] == "nothing of run r is to be deleted"
