"""Listings: all of them, in key order, and only what was asked for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.object_store import Listed, ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig

NUM_KEYS = 1005


def test_s07_a_listing_goes_on_past_a_thousand_keys(store: ObjectStore) -> None:
    keys = [f"ckpt/{number:05d}/x" for number in range(NUM_KEYS)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b"x"), keys))
    assert [listed.key for listed in store.list("ckpt/")] == keys
    assert [listed.key for listed in store.list("ckpt/", start_after=keys[-3])] == keys[-2:]


def test_a_listing_stays_within_its_prefix(store: ObjectStore) -> None:
    keys = ["a-b/x", "a/x", "a/x.json", "a/x/y", "a/x0", "a0", "b", "ä/ö"]
    for key in reversed(keys):
        if key not in ("a/x",):
            store.put(key, b"12")
    there = [key for key in keys if key != "a/x"]
    found = sorted(store.list(""), key=lambda listed: listed.key)
    assert found == [Listed(key=key, num_bytes=2) for key in there]
    assert sorted(listed.key for listed in store.list("a/x")) == ["a/x.json", "a/x/y", "a/x0"]
    assert [listed.key for listed in store.list("a/x/")] == ["a/x/y"]
    assert list(store.list("nothing/")) == []
    for elsewhere in ("a//", "../", "a/../b", "/a/"):
        assert list(store.list(elsewhere)) == []


@pytest.mark.parametrize("kind", ["memory", "local", "moto"])
def test_a_listing_is_in_key_order_and_can_start_behind_any_key(
    make_config: Callable[[str], StoreConfig], kind: str
) -> None:
    store = open_store(make_config(kind), writing=True)
    keys = ["a-b/x", "a/x.json", "a/x/y", "a/x/z", "a0", "b"]
    for key in keys:
        store.put(key, b"x")
    for after in [*keys, "a/", "a/x", "a/x/", "a/x/yy", "0", "z"]:
        found = [listed.key for listed in store.list("", start_after=after)]
        assert found == [key for key in keys if key > after]


def test_numbered_steps_are_listed_in_order_behind_a_commit(store: ObjectStore) -> None:
    names = ["attempts/a/policy/x", "commit.json", "plan-0000.json", "stages/train/d.json"]
    keys = [f"runs/r/steps/{step:08d}/{name}" for step in (9, 10, 100) for name in names]
    for key in reversed(keys):
        store.put(key, b"x")
    for index, after in enumerate(keys):
        listed = store.list("runs/r/steps/", start_after=after)
        assert [entry.key for entry in listed] == keys[index + 1 :]


def test_folders_are_named_once(store: ObjectStore) -> None:
    for key in ("runs/a/run.json", "runs/a/steps/1/x", "runs/a-b/y", "runs/file", "other/c/x"):
        store.put(key, b"x")
    assert store.folders("runs/") == ["a", "a-b"]
    assert store.folders("nothing/") == []
