"""What every backend promises of single objects and of the two conditional puts."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from storage.backends import BACKENDS
from storage.errors import AlreadyExists, CommitConflict, NotFound
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig

NUM_WRITERS = 8
NUM_ROUNDS = 3


def test_an_object_comes_back_as_it_was_put(store: ObjectStore) -> None:
    store.put("a/b/c.bin", b"\x00\xff bytes")
    assert store.get("a/b/c.bin") == b"\x00\xff bytes"
    assert store.size("a/b/c.bin") == 8
    store.put("a/b/c.bin", b"")
    assert store.get("a/b/c.bin") == b""


def test_a_range_is_cut_at_the_end_of_the_object(store: ObjectStore) -> None:
    store.put("a", b"0123456789")
    assert store.get_range("a", 3, 4) == b"3456"
    assert store.get_range("a", 8, 100) == b"89"
    assert store.get_range("a", 10, 5) == b""
    assert store.get_range("a", 2, 0) == b""


@pytest.mark.parametrize("num_bytes", [0, 5, (40 << 20) + 7], ids=["empty", "small", "parts"])
def test_a_file_makes_the_round_trip(store: ObjectStore, tmp_path: Path, num_bytes: int) -> None:
    payload = os.urandom(num_bytes)
    (tmp_path / "up").write_bytes(payload)
    store.upload("a/file", tmp_path / "up")
    store.download("a/file", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == payload
    assert store.size("a/file") == num_bytes


def test_what_is_not_there_is_not_found(store: ObjectStore, tmp_path: Path) -> None:
    reads: list[Callable[[], object]] = [
        lambda: store.get("no/such"),
        lambda: store.get_with_etag("no/such"),
        lambda: store.get_range("no/such", 0, 1),
        lambda: store.size("no/such"),
        lambda: store.download("no/such", tmp_path / "x"),
    ]
    for read in reads:
        with pytest.raises(NotFound, match="no/such"):
            read()
    store.put("folder/inside", b"x")
    with pytest.raises(NotFound):
        store.get("folder")


def test_deleting_twice_is_no_error(store: ObjectStore) -> None:
    store.put("a", b"x")
    store.delete("a")
    store.delete("a")
    with pytest.raises(NotFound):
        store.get("a")


def test_creating_what_exists_with_other_bytes_loses(store: ObjectStore) -> None:
    etag = store.put_if_absent("a", b"first")
    with pytest.raises(AlreadyExists, match="a exists in"):
        store.put_if_absent("a", b"second")
    assert store.get_with_etag("a") == (b"first", etag)


def test_creating_what_exists_with_our_bytes_counts_as_created(store: ObjectStore) -> None:
    etag = store.put_if_absent("a", b"ours")
    assert store.put_if_absent("a", b"ours") == etag


def test_a_stale_etag_loses(store: ObjectStore) -> None:
    first = store.put_if_absent("a", b"first")
    second = store.put_if_match("a", b"second", first)
    with pytest.raises(CommitConflict, match="Reload"):
        store.put_if_match("a", b"third", first)
    assert store.get_with_etag("a") == (b"second", second)
    store.delete("a")
    with pytest.raises(CommitConflict):
        store.put_if_match("a", b"fourth", second)
    with pytest.raises(NotFound):
        store.get("a")


def test_one_of_many_racing_creators_wins(store: ObjectStore) -> None:
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        for number in range(NUM_ROUNDS):
            key = f"race/{number}"
            wins = list(
                pool.map(lambda writer, key=key: _creates(store, key, writer), range(NUM_WRITERS))
            )
            assert wins.count(True) == 1
            assert store.get(key) == f"writer {wins.index(True)}".encode()


def test_one_of_many_racing_replacers_wins(store: ObjectStore) -> None:
    etag = store.put_if_absent("race", b"start")
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        for number in range(2):
            wins = list(
                pool.map(
                    lambda writer, etag=etag, number=number: _replaces(
                        store, etag, f"{number}/{writer}"
                    ),
                    range(NUM_WRITERS),
                )
            )
            assert wins.count(True) == 1
            stored, etag = store.get_with_etag("race")
            assert stored == f"{number}/{wins.index(True)}".encode()


@pytest.mark.parametrize("kind", ["local", pytest.param("seaweed", marks=pytest.mark.s3)])
def test_one_of_many_racing_processes_wins(
    make_config: Callable[[str], StoreConfig], kind: str
) -> None:
    config = make_config(kind)
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    pipes = [context.Pipe(duplex=False) for _ in range(4)]
    writers = [
        context.Process(target=_race_in_process, args=(config, number, start, pipe[1]))
        for number, pipe in enumerate(pipes)
    ]
    for writer in writers:
        writer.start()
    outcomes = [pipe[0].recv() for pipe in pipes]
    for writer in writers:
        writer.join()
    store = open_store(config, writing=False)
    for number in range(NUM_ROUNDS):
        wins = [outcome[number] for outcome in outcomes]
        assert wins.count(True) == 1
        assert store.get(f"race/{number}") == f"writer {wins.index(True)}".encode()
    # Every increment that was acknowledged counts: none was lost between two processes.
    assert int(store.get("counter")) == sum(outcome[-1] for outcome in outcomes)


def test_a_writer_killed_at_any_moment_leaves_whole_objects_and_no_lock(tmp_path: Path) -> None:
    config = StoreConfig(uri=str(tmp_path / "store"))
    store = open_store(config, writing=True)
    context = multiprocessing.get_context("spawn")
    for round_ in range(4):
        writer = context.Process(target=_write_for_ever, args=(config, round_))
        writer.start()
        assert writer.pid is not None
        while not any(True for _ in store.list(f"kill/{round_}/")):
            time.sleep(0.01)
        time.sleep(0.03 * round_)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    for listed in store.list("kill/"):
        assert set(store.get(listed.key)) == {ord("x")}
        assert listed.num_bytes == 1 << 20
    replaced, etag = store.get_with_etag("shared")
    assert len(replaced) == 1 << 20
    store.put_if_match("shared", b"free", etag)


def _creates(store: ObjectStore, key: str, writer: int) -> bool:
    try:
        store.put_if_absent(key, f"writer {writer}".encode())
    except AlreadyExists:
        return False
    return True


def _replaces(store: ObjectStore, etag: str, text: str) -> bool:
    try:
        store.put_if_match("race", text.encode(), etag)
    except CommitConflict:
        return False
    return True


def _race_in_process(config: StoreConfig, writer: int, start: object, pipe: Connection) -> None:
    store = BACKENDS[config.scheme](config)
    outcomes: list[object] = []
    for number in range(NUM_ROUNDS):
        start.wait()  # type: ignore[attr-defined]
        outcomes.append(_creates(store, f"race/{number}", writer))
    outcomes.append(sum(_increments(store, writer) for _ in range(10)))
    pipe.send(outcomes)


def _increments(store: ObjectStore, writer: int) -> bool:
    """Adds one to a shared counter; values carry no owner, so equal bytes never confuse it."""
    with contextlib.suppress(AlreadyExists):
        store.put_if_absent("counter", b"0")
    stored, etag = store.get_with_etag("counter")
    padded = b" " * (writer + 1) + str(int(stored) + 1).encode()
    try:
        store.put_if_match("counter", padded, etag)
    except CommitConflict:
        return False
    return True


def _write_for_ever(config: StoreConfig, round_: int) -> None:
    store = BACKENDS[config.scheme](config)
    number = 0
    while True:
        store.put_if_absent(f"kill/{round_}/{number}", b"x" * (1 << 20))
        try:
            store.put_if_absent("shared", b"y" * (1 << 20))
        except AlreadyExists:
            _, etag = store.get_with_etag("shared")
            store.put_if_match("shared", bytes([65 + number % 26]) * (1 << 20), etag)
        number += 1
