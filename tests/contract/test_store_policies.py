"""Policies, inputs, shards and the cache, over every backend."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from storage import policies
from storage.errors import Corrupt, NotFound
from storage.experience import read_shard, rows_to_table, write_shard
from storage.inputs import open_input, put_input
from storage.layout import StepScope
from storage.object_store import ObjectStore
from storage.objects import fetch_file, offer_file, put_object, read_object, upload_file
from storage.records import InputRef, PolicyRef, Probe
from storage.safetensors_files import RawTensor, write_index, write_tensors
from storage.schemas import TRAIN
from tests.contract.faulty_store import FaultyStore

PROBE = Probe(token_ids=[[1, 2]], logprobs=[[None, -0.5]], next_token_ids=[3], next_logprobs=[-1.5])
SCOPE = StepScope(run="r", step=1)
WEIGHTS = {
    f"layer.{index}.weight": RawTensor("BF16", (4, 8), bytes([index + 1]) * 64)
    for index in range(5)
}


def write(store: ObjectStore, directory: Path, **changes: object) -> PolicyRef:
    options = {
        "scope": SCOPE,
        "attempt": "a",
        "version": 1,
        "dtype": "bfloat16",
        "tied": {},
        "probe": PROBE,
        "cache": None,
    }
    return policies.write_policy(store, directory, **(options | changes))  # type: ignore[arg-type]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    write_tensors(tmp_path / "weights", WEIGHTS, max_file_bytes=128)
    return tmp_path / "weights"


def test_a_policy_makes_the_round_trip(store: ObjectStore, weights: Path, tmp_path: Path) -> None:
    policy = write(store, weights)
    assert len(policy.files) == 3
    opened = policies.open_policy(store, policy, cache=tmp_path / "cache")
    assert policies.policy_digest(opened) == policy.digest == policies.policy_digest(weights)
    for path in weights.iterdir():
        assert (opened / path.name).read_bytes() == path.read_bytes()
    assert policies.read_probe(store, policy) == PROBE
    again = policies.open_policy(store, policy, cache=tmp_path / "cache")
    assert again == opened
    write_index(weights)


def test_a_reader_on_this_host_downloads_nothing(
    store: ObjectStore, weights: Path, tmp_path: Path
) -> None:
    policy = write(store, weights, cache=tmp_path / "cache")
    counting = FaultyStore(store)
    policies.open_policy(counting, policy, cache=tmp_path / "cache")
    assert counting.calls == []


def test_a_spoilt_cache_is_downloaded_again(
    store: ObjectStore, weights: Path, tmp_path: Path
) -> None:
    policy = write(store, weights, cache=tmp_path / "cache")
    first = policies.open_policy(store, policy, cache=tmp_path / "cache")
    for path in weights.iterdir():
        # Linked into the cache: a writer that reuses its files spoils the cached copy.
        path.write_bytes(b"reused")
    second = policies.open_policy(store, policy, cache=tmp_path / "cache")
    assert second == first
    assert policies.policy_digest(second) == policy.digest


def test_a_changed_policy_file_is_corrupt_by_name_and_old_tensors_are_not_served(
    store: ObjectStore, weights: Path, tmp_path: Path
) -> None:
    policy = write(store, weights)
    key = policy.files[1].key
    payload = bytearray(store.get(key))
    payload[-1] ^= 1
    store.put(key, bytes(payload))
    with pytest.raises(Corrupt, match="model-00002-of-00003"):
        policies.open_policy(store, policy, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("policies/*"))
    store.delete(key)
    with pytest.raises(NotFound, match="model-00002-of-00003"):
        policies.open_policy(store, policy, cache=tmp_path / "cache")


def test_a_changed_probe_is_corrupt(store: ObjectStore, weights: Path) -> None:
    policy = write(store, weights)
    store.put(policy.probe.key, b"{}")
    with pytest.raises(Corrupt, match=r"probe\.json"):
        policies.read_probe(store, policy)


def test_a_tied_tensor_is_stored_once(store: ObjectStore, tmp_path: Path) -> None:
    tensors = {"embed": RawTensor("F32", (2,), bytes(8)), "norm": RawTensor("F32", (1,), bytes(4))}
    write_tensors(tmp_path / "tied", tensors, max_file_bytes=1 << 20)
    policy = write(store, tmp_path / "tied", dtype="float32", tied={"lm_head": "embed"})
    assert policy.tied == {"lm_head": "embed"}
    with pytest.raises(ValueError, match="lm_head is tied to missing"):
        write(store, tmp_path / "tied", dtype="float32", tied={"lm_head": "missing"})
    doubled = tensors | {"lm_head": tensors["embed"]}
    write_tensors(tmp_path / "doubled", doubled, max_file_bytes=1 << 20)
    with pytest.raises(ValueError, match="Save it once"):
        write(store, tmp_path / "doubled", dtype="float32", tied={"lm_head": "embed"})


def test_a_policy_of_another_dtype_is_refused(store: ObjectStore, weights: Path) -> None:
    with pytest.raises(ValueError, match="is BF16 in a float32 policy"):
        write(store, weights, dtype="float32")
    assert list(store.list("")) == []


def test_racing_readers_of_one_cache_all_get_the_file(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(1 << 20))
    ref = upload_file(store, "a/file", tmp_path / "file")
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(fetch_file, store, ref, cache=tmp_path / "cache") for _ in range(16)]
    paths = {read.result() for read in reads}
    assert len(paths) == 1
    assert paths.pop().read_bytes() == (tmp_path / "file").read_bytes()
    assert len(list((tmp_path / "cache" / ref.sha256[:2]).iterdir())) == 1


def test_a_file_of_twelve_mebibytes_is_verified_by_its_own_sha256(
    store: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(os.urandom(12 << 20))
    ref = upload_file(store, "a/file", tmp_path / "file")
    assert fetch_file(store, ref, cache=tmp_path / "cache").stat().st_size == 12 << 20


def test_an_offered_file_is_found_and_leaves_nothing_else(
    store: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"payload")
    ref = upload_file(store, "a/file", tmp_path / "file")
    for _ in range(2):
        path = offer_file(tmp_path / "cache", tmp_path / "file", ref.sha256)
    assert list(path.parent.iterdir()) == [path]
    store.delete("a/file")
    assert fetch_file(store, ref, cache=tmp_path / "cache").read_bytes() == b"payload"


def test_an_object_with_other_bytes_is_corrupt_with_its_key(store: ObjectStore) -> None:
    ref = put_object(store, "a/b", b"right")
    store.put("a/b", b"wrong")
    with pytest.raises(Corrupt, match=f"a/b in .*expected 5 bytes with sha256 {ref.sha256}"):
        read_object(store, ref)


@pytest.fixture
def tokenizer(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "template").write_text("{{ messages }}")
    return {"tokenizer.json": tmp_path / "t.json", "chat/template.jinja": tmp_path / "template"}


def test_an_input_makes_the_round_trip_and_is_sent_once(
    store: ObjectStore, tokenizer: dict[str, Path], tmp_path: Path
) -> None:
    ref = put_input(store, tokenizer)
    again = FaultyStore(store)
    assert put_input(again, dict(reversed(tokenizer.items()))) == ref
    assert [call for call in again.calls if call.startswith(("put", "upload"))] == []
    directory = open_input(store, ref, cache=tmp_path / "cache")
    assert (directory / "chat/template.jinja").read_text() == "{{ messages }}"
    assert open_input(store, ref, cache=tmp_path / "cache") == directory


def test_an_input_that_was_changed_is_corrupt(
    store: ObjectStore, tokenizer: dict[str, Path], tmp_path: Path
) -> None:
    ref = put_input(store, tokenizer)
    renamed = InputRef(digest=ref.digest, files={"other": ref.files["tokenizer.json"]})
    with pytest.raises(Corrupt, match=f"Input {ref.digest}"):
        open_input(store, renamed, cache=tmp_path / "cache")
    store.put(ref.files["tokenizer.json"].key, b"[]")
    with pytest.raises(Corrupt, match=r"tokenizer\.json"):
        open_input(store, ref, cache=tmp_path / "cache")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../b", "", "a//b"])
def test_an_input_cannot_leave_its_directory(store: ObjectStore, tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_text("x")
    with pytest.raises(ValueError, match="cannot name a file"):
        put_input(store, {name: tmp_path / "x"})


def test_a_shard_makes_the_round_trip_and_a_flipped_byte_is_found(store: ObjectStore) -> None:
    row = {
        "sample_id": "s",
        "group_id": "g",
        "advantage": 0.5,
        "kept": True,
        "reason": None,
        "learner_logprobs": [-12.34, -12.3],
    }
    ref = write_shard(store, rows_to_table([row], schema=TRAIN), schema=TRAIN, key="a/train")
    assert ref.rows == 1
    table = read_shard(store, ref, schema=TRAIN, columns=["sample_id", "advantage"])
    assert table.to_pylist() == [{"sample_id": "s", "advantage": 0.5}]
    payload = bytearray(store.get("a/train"))
    payload[40] ^= 1
    store.put("a/train", bytes(payload))
    with pytest.raises(Corrupt, match="a/train"):
        read_shard(store, ref, schema=TRAIN)


def test_s16_a_shard_of_another_schema_is_corrupt_by_file_and_column(store: ObjectStore) -> None:
    other = TRAIN.set(2, pa.field("advantage", pa.int64()))
    ref = write_shard(store, other.empty_table(), schema=other, key="a/train")
    with pytest.raises(Corrupt, match=r"a/train: Column 'advantage' is int64, expected double"):
        read_shard(store, ref, schema=TRAIN)


def test_s26_a_killed_upload_leaves_no_policy_and_a_retry_writes_it(
    store: ObjectStore, weights: Path, tmp_path: Path
) -> None:
    counting = FaultyStore(store)
    whole = write(counting, weights)
    for fail_at in range(1, counting.num_calls + 1):
        for listed in list(store.list("")):
            store.delete(listed.key)
        with pytest.raises(ConnectionError):
            write(FaultyStore(store, fail_at, error=ConnectionError), weights)
        retried = write(store, weights)
        assert retried == whole
        policies.open_policy(store, retried, cache=tmp_path / f"cache-{fail_at}")
