"""Opening a store: what it checks, what it writes, and what it says when it cannot."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.backends import local, s3
from storage.errors import NotFound, Unavailable
from storage.object_store import ObjectStore
from storage.objects import fetch_file, put_object
from storage.opening import create_bucket, open_store
from storage.store_config import StoreConfig

DIE_IN_UPLOAD = """
import os, signal, sys
from pathlib import Path
from storage.backends import s3
from storage.store_config import StoreConfig
store = s3.open_s3(StoreConfig.model_validate_json(sys.argv[1]))
send = store._bulk.upload_part
def send_one_and_die(**options):
    send(**options)
    os.kill(os.getpid(), signal.SIGKILL)
store._bulk.upload_part = send_one_and_die
store.upload("attempts/a/weights", Path(sys.argv[2]))
"""


def test_opening_for_writing_leaves_nothing_behind(store_config: StoreConfig) -> None:
    store = open_store(store_config, writing=True)
    assert list(store.list("")) == []


def test_opening_for_reading_writes_nothing(
    store_config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(store_config, writing=True).put("a", b"x")
    store = open_store(store_config, writing=False)
    assert store.get("a") == b"x"
    assert [listed.key for listed in store.list("")] == ["a"]


def test_reading_a_directory_that_is_not_there_creates_none(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="There is no directory"):
        open_store(StoreConfig(uri=str(tmp_path / "no")), writing=False)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("uri", ["ftp://x/y", "s3://", "s3:///prefix"])
def test_an_address_that_names_no_store_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="Store address"):
        StoreConfig(uri=uri)


def test_a_directory_and_its_file_address_are_one_store(tmp_path: Path) -> None:
    spaced = tmp_path / "a b"
    store = open_store(StoreConfig(uri=str(spaced)), writing=True)
    store.put("k", b"x")
    assert open_store(StoreConfig(uri=store.uri), writing=False).get("k") == b"x"


def test_a_missing_bucket_is_named_and_can_be_created(s3_config: StoreConfig) -> None:
    bucket = "bucket-" + s3_config.prefix[:12]
    config = s3_config.model_copy(update={"uri": f"s3://{bucket}/runs-of-mine"})
    for writing in (True, False):
        with pytest.raises(Unavailable, match=f"no bucket '{bucket}'"):
            open_store(config, writing=writing)
    create_bucket(config)
    create_bucket(config)
    open_store(config, writing=True).put("a", b"x")


@pytest.mark.s3
@pytest.mark.parametrize("writing", [True, False])
def test_wrong_credentials_are_named(
    make_config: Callable[[str], StoreConfig], monkeypatch: pytest.MonkeyPatch, writing: bool
) -> None:
    config = make_config("seaweed")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(Unavailable, match="refuses the credentials"):
        open_store(config, writing=writing)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(Unavailable, match="refuses the credentials"):
        open_store(config, writing=writing)


def open_uploads(store: ObjectStore) -> list[str]:
    assert isinstance(store, s3.S3Store)
    answer = store._bulk.list_multipart_uploads(Bucket=store._bucket, Prefix=store._prefix)
    return [upload["Key"] for upload in answer.get("Uploads", [])]


def test_an_upload_killed_in_the_middle_is_no_object_and_is_swept(
    s3_config: StoreConfig, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(os.urandom(5 * s3.PART_BYTES))
    writer = subprocess.run(
        [sys.executable, "-c", DIE_IN_UPLOAD, s3_config.model_dump_json(), str(weights)],
        check=False,
    )
    assert writer.returncode == -signal.SIGKILL
    store = s3.open_s3(s3_config)
    with pytest.raises(NotFound):
        store.get("attempts/a/weights")
    assert list(store.list("")) == []
    assert len(open_uploads(store)) == 1
    assert store.sweep("attempts/b/", older_than_s=0) == 0
    assert store.sweep("attempts/", older_than_s=0) == 1
    assert open_uploads(store) == []


@pytest.mark.s3
def test_a_young_upload_may_be_a_living_writers_and_is_left_alone(
    make_config: Callable[[str], StoreConfig],
) -> None:
    store = s3.open_s3(make_config("seaweed"))
    store._bulk.create_multipart_upload(**store._named("attempts/a/weights"))
    open_store(store._config, writing=True)
    assert len(open_uploads(store)) == 1


def test_an_old_upload_is_swept_at_the_next_opening(
    s3_config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3_config, writing=True)
    assert isinstance(store, s3.S3Store)
    store._bulk.create_multipart_upload(**store._named("attempts/a/weights"))
    monkeypatch.setattr("storage.opening.STALE_AFTER_S", 0.0)
    assert open_uploads(open_store(s3_config, writing=True)) == []


def test_an_upload_that_fails_is_aborted_at_once(
    s3_config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(os.urandom(5 * s3.PART_BYTES))
    store = s3.open_s3(s3_config)
    send = store._bulk.upload_part

    def break_second_part(**options: object) -> object:
        if options["PartNumber"] == 2:
            raise RuntimeError("provoked")
        return send(**options)

    monkeypatch.setattr(store._bulk, "upload_part", break_second_part)
    with pytest.raises(RuntimeError, match="provoked"):
        store.upload("a", weights)
    assert open_uploads(store) == []


def test_temporary_files_of_dead_writers_are_swept_and_of_living_ones_kept(
    tmp_path: Path,
) -> None:
    store = local.LocalStore(tmp_path)
    store.put("a", b"x")
    folder = tmp_path / local.PRIVATE / "tmp"
    (folder / "dead").write_bytes(b"half")
    long_ago = 1_000_000_000
    os.utime(folder / "dead", (long_ago, long_ago))
    with store._staged() as staged:
        os.utime(staged, (long_ago, long_ago))
        assert store.sweep("", older_than_s=0) == 1
        assert list(folder.iterdir()) == [staged]
    assert list(folder.iterdir()) == []
    assert [listed.key for listed in store.list("")] == ["a"]


def test_a_sweeper_that_comes_second_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local.LocalStore(tmp_path)
    store.put("a", b"x")
    dead = tmp_path / local.PRIVATE / "tmp" / "dead"
    dead.write_bytes(b"half")

    def removed_meanwhile(path: Path) -> float:
        path.unlink()
        return 0.0

    monkeypatch.setattr(local, "_modified", removed_meanwhile)
    assert store.sweep("", older_than_s=0) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_said_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        store = open_store(StoreConfig(uri=str(disk / "store")), writing=True)
        store.put_if_absent("first", b"x" * (1 << 20))
        (tmp_path / "big").write_bytes(b"x" * (4 << 20))
        writes: list[Callable[[], object]] = [
            lambda: store.put("big", b"x" * (4 << 20)),
            lambda: store.put_if_absent("big", b"x" * (4 << 20)),
            lambda: store.upload("big", tmp_path / "big"),
        ]
        for write in writes:
            with pytest.raises(Unavailable, match="No space left for big"):
                write()
        assert [listed.key for listed in store.list("")] == ["first"]
        store.put("second", b"x" * (1 << 19))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_cache_is_said_and_is_not_the_stores_fault(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        store = open_store(StoreConfig(uri=str(tmp_path / "store")), writing=True)
        ref = put_object(store, "big", b"x" * (4 << 20))
        with pytest.raises(Unavailable, match=r"The cache .* cannot keep big"):
            fetch_file(store, ref, cache=disk)
        assert [path for path in disk.rglob("*") if path.is_file()] == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_system_without_hard_links_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(Unavailable, match="refuses hard links"):
        open_store(StoreConfig(uri=str(tmp_path / "store")), writing=True)


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../../b", "a/", ".rollbook-store/x"])
def test_a_key_cannot_leave_the_directory(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="cannot be a key"):
        local.LocalStore(tmp_path).put(key, b"x")
