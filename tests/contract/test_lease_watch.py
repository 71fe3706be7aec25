"""Who of many services is alive, on the observer's own clock."""

import time
import uuid

from storage.layout import lease_key
from storage.lease_watch import LeaseWatch
from storage.leases import LeaseState, hold, read_lease
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig


def fresh_store() -> ObjectStore:
    return open_store(StoreConfig(uri=f"memory://{uuid.uuid4().hex}"), writing=True)


def elsewhere(store: ObjectStore, role: str, *, ttl_s: float) -> LeaseState:
    """A lease of another host, of which only the store can tell."""
    with hold(store, "run", role, {"address": "http://far:1"}, ttl_s=ttl_s):
        found = read_lease(store, "run", role)
    assert found is not None
    assert found[0] is not None
    state = found[0].model_copy(update={"host": "far", "released": False})
    store.put_if_match(lease_key("run", role), state.to_bytes(), read_lease(store, "run", role)[1])
    return state


def test_services_come_and_go():
    store = fresh_store()
    watch = LeaseWatch(store, "run", "rollout-service-")
    with (
        hold(store, "run", "rollout-service-a", {"address": "http://a"}),
        hold(store, "run", "train-service-b"),
        hold(store, "run", "controller"),
    ):
        assert [state.holder["address"] for state in watch.living()] == ["http://a"]
        with hold(store, "run", "rollout-service-c"):
            assert len(watch.living()) == 2
        assert len(watch.living()) == 1
    assert watch.living() == []


def test_a_silent_service_of_another_host_is_dead_after_its_time_and_alive_at_its_next_sign():
    store = fresh_store()
    state = elsewhere(store, "rollout-service-a", ttl_s=0.5)
    watch = LeaseWatch(store, "run", "rollout-service-")
    assert len(watch.living()) == 1
    time.sleep(0.6)
    assert watch.living() == []
    found = read_lease(store, "run", "rollout-service-a")
    assert found is not None
    later = state.model_copy(update={"beat": state.beat + 1})
    store.put_if_match(lease_key("run", "rollout-service-a"), later.to_bytes(), found[1])
    assert len(watch.living()) == 1


def test_what_a_holder_says_of_itself_arrives_with_its_next_renewal():
    store = fresh_store()
    with hold(store, "run", "rollout-service-a", {"calls": 0}, ttl_s=0.3) as lease:
        lease.describe({"calls": 7})
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            found = read_lease(store, "run", "rollout-service-a")
            if found and found[0] and found[0].holder == {"calls": 7}:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("the renewal did not bring it")
