"""Leases: one living holder, takeover from the dead, and nobody trusts another's clock."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from storage import leases
from storage.errors import LeaseHeld
from storage.layout import lease_key
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig
from tests.contract.faulty_store import FaultyStore

TTL_S = 0.9

HOLD_UNTIL_KILLED = """
import sys, time
from storage import leases
from storage.opening import open_store
from storage.store_config import StoreConfig
store = open_store(StoreConfig.model_validate_json(sys.argv[1]), writing=True)
lease = leases.hold(store, "r", "controller", {"address": "here"}, ttl_s=float(sys.argv[2]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def start_holder() -> Iterator[Callable[[StoreConfig], "subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []

    def start(config: StoreConfig) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", HOLD_UNTIL_KILLED, config.model_dump_json(), str(TTL_S)]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        return holder

    yield start
    for holder in started:
        holder.kill()
        holder.communicate()


def test_a_second_holder_is_refused_and_told_who_holds(store: ObjectStore) -> None:
    with (
        leases.hold(store, "r", "controller", {"address": "here"}, ttl_s=TTL_S),
        pytest.raises(LeaseHeld, match=f"living controller: process {os.getpid()} on"),
    ):
        leases.hold(store, "r", "controller", ttl_s=TTL_S)


def test_a_released_lease_is_free_at_once(store: ObjectStore) -> None:
    with leases.hold(store, "r", "controller", ttl_s=60) as first:
        assert not first.lost
    first.release()
    assert leases.peek(store, "r", "controller") is None
    start = time.monotonic()
    leases.hold(store, "r", "controller", ttl_s=60).release()
    assert time.monotonic() - start < 5


def test_an_error_in_the_context_releases_too(store: ObjectStore) -> None:
    with pytest.raises(KeyError), leases.hold(store, "r", "controller", ttl_s=60):
        raise KeyError
    assert leases.peek(store, "r", "controller") is None


def test_roles_and_runs_do_not_block_each_other(store: ObjectStore) -> None:
    with (
        leases.hold(store, "r", "controller", ttl_s=60),
        leases.hold(store, "r", "rollout-0", {"port": 1}, ttl_s=60),
        leases.hold(store, "q", "controller", ttl_s=60),
    ):
        found = leases.peek(store, "r", "rollout-0")
        assert found is not None
        assert found.holder == {"port": 1}


def test_one_of_many_racing_holders_wins(store: ObjectStore) -> None:
    def take(_: int) -> leases.Lease | None:
        try:
            return leases.hold(store, "r", "controller", ttl_s=3)
        except LeaseHeld:
            return None

    with ThreadPoolExecutor(4) as pool:
        taken = [lease for lease in pool.map(take, range(4)) if lease is not None]
    assert len(taken) == 1
    taken[0].release()


def test_a_holder_that_lives_keeps_its_lease_past_its_time(store: ObjectStore) -> None:
    with leases.hold(store, "r", "controller", ttl_s=TTL_S) as lease:
        time.sleep(2 * TTL_S)
        with pytest.raises(LeaseHeld):
            leases.hold(store, "r", "controller", ttl_s=TTL_S)
        assert lease.state.beat > 0
        assert not lease.lost


@pytest.mark.parametrize("kind", ["local", pytest.param("seaweed", marks=pytest.mark.s3)])
def test_the_lease_of_a_killed_process_on_this_host_is_free_at_once(
    make_config: Callable[[str], StoreConfig],
    start_holder: Callable[[StoreConfig], "subprocess.Popen[str]"],
    kind: str,
) -> None:
    config = make_config(kind)
    holder = start_holder(config)
    store = open_store(config, writing=True)
    with pytest.raises(LeaseHeld, match=f"process {holder.pid} on"):
        leases.hold(store, "r", "controller", ttl_s=60)
    os.kill(holder.pid, signal.SIGKILL)
    # Not even reaped yet: a zombie counts as gone.
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert leases.peek(store, "r", "controller") is None
    start = time.monotonic()
    leases.hold(store, "r", "controller", ttl_s=60).release()
    assert time.monotonic() - start < TTL_S


def test_a_stopped_process_loses_its_lease_and_notices(
    make_config: Callable[[str], StoreConfig],
    start_holder: Callable[[StoreConfig], "subprocess.Popen[str]"],
) -> None:
    config = make_config("local")
    holder = start_holder(config)
    store = open_store(config, writing=True)
    os.kill(holder.pid, signal.SIGSTOP)
    time.sleep(0.1)
    with leases.hold(store, "r", "controller", ttl_s=TTL_S) as ours:
        os.kill(holder.pid, signal.SIGCONT)
        time.sleep(2 * TTL_S)
        assert not ours.lost
        assert ours.state.pid == os.getpid()


def on_another_host(store: ObjectStore, **changes: object) -> leases.LeaseState:
    """Leaves a lease that another host took and stopped renewing."""
    with leases.hold(store, "r", "controller", ttl_s=TTL_S) as lease:
        state = lease.state.model_copy(update={"host": "elsewhere", "token": "theirs", **changes})
    _, etag = store.get_with_etag(lease_key("r", "controller"))
    store.put_if_match(lease_key("r", "controller"), state.to_bytes(), etag)
    return state


@pytest.mark.parametrize("since", [0.0, 4_000_000_000.0], ids=["long ago", "in the future"])
def test_a_silent_holder_elsewhere_is_dead_after_its_time_whatever_its_clock(
    store: ObjectStore, since: float
) -> None:
    on_another_host(store, since=since)
    start = time.monotonic()
    with leases.hold(store, "r", "controller", ttl_s=60) as lease:
        assert lease.state.host != "elsewhere"
    assert time.monotonic() - start >= TTL_S


def test_a_look_tells_the_living_from_the_dead_and_takes_nothing(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen() -> str:
        return leases.look(store, "r", "controller").kind

    assert seen() == "free"
    with leases.hold(store, "r", "controller", ttl_s=60):
        assert seen() == "alive"
    assert seen() == "free"
    on_another_host(store)
    assert seen() == "dead"
    with leases.hold(store, "r", "controller", ttl_s=TTL_S) as lease:
        before = lease.state.beat
        # As from another host, where a process id says nothing: alive at its next beat.
        monkeypatch.setattr(leases, "_is_ours_to_see", lambda state: False)
        assert seen() == "alive"
        assert lease.state.beat > before


def test_a_holder_whose_lease_was_taken_knows_and_does_not_take_it_back(
    store: ObjectStore,
) -> None:
    with leases.hold(store, "r", "controller", ttl_s=TTL_S) as lease:
        key = lease_key("r", "controller")
        while True:
            _, etag = store.get_with_etag(key)
            theirs = lease.state.model_copy(update={"host": "elsewhere", "token": "theirs"})
            try:
                store.put_if_match(key, theirs.to_bytes(), etag)
                break
            except Exception:
                continue
        deadline = time.monotonic() + 5
        while not lease.lost and time.monotonic() < deadline:
            time.sleep(0.05)
        assert lease.lost
    found = leases.peek(store, "r", "controller")
    assert found is not None
    assert found.token == "theirs"


def test_a_renewal_that_fails_once_is_made_up_for(store: ObjectStore) -> None:
    # Calls: get_with_etag, put_if_absent, then renewals.
    faulty = FaultyStore(store, fail_at=3)
    with leases.hold(faulty, "r", "controller", ttl_s=TTL_S) as lease:
        time.sleep(1.5 * TTL_S)
        assert not lease.lost
        assert lease.state.beat > 0
    assert leases.peek(store, "r", "controller") is None


def test_a_renewal_whose_answer_was_lost_is_still_ours(store: ObjectStore) -> None:
    faulty = FaultyStore(store, fail_at=3, when="after")
    with leases.hold(faulty, "r", "controller", ttl_s=TTL_S) as lease:
        time.sleep(1.5 * TTL_S)
        assert not lease.lost
    assert leases.peek(store, "r", "controller") is None


@pytest.mark.parametrize("payload", [b"", b"{", b'{"run":"r"}'])
def test_a_lease_that_does_not_parse_is_named_and_taken(
    store: ObjectStore, caplog: pytest.LogCaptureFixture, payload: bytes
) -> None:
    key = lease_key("r", "controller")
    store.put(key, payload)
    assert leases.peek(store, "r", "controller") is None
    with leases.hold(store, "r", "controller", ttl_s=60) as lease:
        assert leases.peek(store, "r", "controller") == lease.state
    assert f"{key} is no lease" in caplog.text


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_a_clock_that_is_set_makes_no_living_holder_look_gone(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with leases.hold(store, "r", "controller", ttl_s=3 * TTL_S):
        boot_time = psutil.boot_time() + 3600
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time)
        monkeypatch.setattr("psutil._pslinux.BOOT_TIME", boot_time, raising=False)
        assert leases.peek(store, "r", "controller") is not None
        with pytest.raises(LeaseHeld):
            leases.hold(store, "r", "controller", ttl_s=TTL_S)
