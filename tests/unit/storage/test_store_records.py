"""Canonical JSON, policy digests, keys and the environment."""

import json
import math
import os
import pickle
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from storage import environment, errors
from storage.errors import Corrupt
from storage.layout import (
    StepScope,
    attempt_key,
    check_run_name,
    commit_key,
    plan_key,
    plan_revision_of_key,
    step_of_commit_key,
    step_of_key,
)
from storage.policies import policy_digest
from storage.records import Plan, StageRecord, canonical_json, input_digest, request_digest
from storage.safetensors_files import RawTensor, read_headers, write_index, write_tensors
from storage.store_config import StoreConfig
from tests.contract import records

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_canonical_json_comes_back_and_is_a_fixed_point(value: Any) -> None:
    encoded = canonical_json(value)
    assert json.loads(encoded) == value
    assert canonical_json(json.loads(encoded)) == encoded


@given(st.dictionaries(st.text(), JSON_VALUES, min_size=2, max_size=5))
def test_the_order_of_keys_does_not_matter(value: dict[str, Any]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


def test_what_json_has_no_word_for_becomes_null_or_an_escape() -> None:
    value = {"nan": math.nan, "inf": [math.inf, -math.inf], "\ud800": "\udfff"}
    expected = b'{"\\\\ud800":"\\\\udfff","inf":[null,null],"nan":null}'
    assert canonical_json(value) == expected
    with pytest.raises(TypeError):
        canonical_json({"x": object()})


def test_a_record_with_odd_text_can_be_read_back() -> None:
    record = records.stage_record().model_copy(update={"notes": ["\ud800", "a\x00b", "\u202e"]})
    assert StageRecord.from_bytes(record.to_bytes()).notes == ["\\ud800", "a\x00b", "\u202e"]


def test_64_bit_integers_are_strings_in_json() -> None:
    plan = records.plan(1)
    shard = {
        "index": 0,
        "start": 0,
        "stop": 1,
        "sampling": {"group_size": 1, "temperature": 1, "max_tokens": 1, "stop_token_ids": []},
        "policy_version": 0,
        "policy_digest": "d",
        "seed": 2**63 - 1,
    }
    with_shard = Plan.model_validate(plan.model_dump() | {"shards": [shard]})
    assert f'"seed":"{2**63 - 1}"'.encode() in with_shard.to_bytes()
    assert Plan.from_bytes(with_shard.to_bytes()).shards[0].seed == 2**63 - 1


def test_s08_names_sorted_as_text_do_not_mislead_steps() -> None:
    keys = [commit_key("r", step) for step in (100, 9, 10)]
    assert sorted(keys) == [commit_key("r", step) for step in (9, 10, 100)]
    assert (
        max(step_of_commit_key(f"runs/r/steps/{n}/commit.json") or 0 for n in (9, 10, 100)) == 100
    )
    assert step_of_commit_key(plan_key("r", 1, 0)) is None
    assert plan_revision_of_key(plan_key("r", 1, 12)) == 12
    assert plan_revision_of_key(commit_key("r", 1)) is None
    assert step_of_key(attempt_key(StepScope(run="r", step=12), "a", "x/y")) == 12


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a b", "..", "ä", "a" * 65])
def test_a_run_name_that_could_be_mistaken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not usable"):
        check_run_name(name)


@given(
    names=st.sets(st.text("abc.xyz", min_size=1, max_size=8), min_size=1, max_size=6),
    max_file_bytes=st.integers(1, 200),
    seed=st.randoms(use_true_random=False),
)
@settings(max_examples=30, deadline=None)
def test_the_policy_digest_does_not_see_how_tensors_are_divided(
    names: set[str], max_file_bytes: int, seed: Any
) -> None:
    tensors = {name: RawTensor("U8", (40,), seed.randbytes(40)) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        one = write_tensors(Path(folder) / "one", tensors, max_file_bytes=1 << 20)
        many = write_tensors(Path(folder) / "many", tensors, max_file_bytes=max_file_bytes)
        assert len(one) == 1
        assert len(many) >= min(len(names), math.ceil(40 * len(names) / max(40, max_file_bytes)))
        digest = policy_digest(Path(folder) / "one")
        assert policy_digest(Path(folder) / "many") == digest
        changed = dict(tensors)
        name = min(names)
        changed[name] = RawTensor("U8", (40,), bytes([tensors[name].payload[0] ^ 1]) + bytes(39))
        write_tensors(Path(folder) / "changed", changed, max_file_bytes=1 << 20)
        assert policy_digest(Path(folder) / "changed") != digest


def test_the_policy_digest_sees_name_dtype_and_shape(tmp_path: Path) -> None:
    variants = {
        "as it is": {"a": RawTensor("F32", (2, 1), bytes(8))},
        "name": {"b": RawTensor("F32", (2, 1), bytes(8))},
        "dtype": {"a": RawTensor("I32", (2, 1), bytes(8))},
        "shape": {"a": RawTensor("F32", (1, 2), bytes(8))},
        "bytes": {"a": RawTensor("F32", (2, 1), bytes(7) + b"\x01")},
        "one more": {"a": RawTensor("F32", (2, 1), bytes(8)), "b": RawTensor("F32", (0,), b"")},
    }
    digests = set()
    for what, tensors in variants.items():
        write_tensors(tmp_path / what, tensors, max_file_bytes=1 << 20)
        digests.add(policy_digest(tmp_path / what))
    assert len(digests) == len(variants)


def test_our_files_are_the_reference_implementations(tmp_path: Path) -> None:
    tensors = {name: os.urandom(24) for name in ("b", "a")}
    raw = {name: RawTensor("F32", (2, 3), payload) for name, payload in tensors.items()}
    paths = write_tensors(tmp_path / "ours", raw, max_file_bytes=1 << 20)
    arrays = load_file(paths[0])
    assert {name: array.tobytes() for name, array in arrays.items()} == tensors
    (tmp_path / "theirs").mkdir()
    save_file(arrays, tmp_path / "theirs" / "x.safetensors")
    assert policy_digest(tmp_path / "theirs") == policy_digest(tmp_path / "ours")


def test_an_index_names_the_file_of_every_tensor(tmp_path: Path) -> None:
    tensors = {name: RawTensor("U8", (10,), bytes(10)) for name in "abc"}
    write_tensors(tmp_path, tensors, max_file_bytes=20)
    index = json.loads(write_index(tmp_path).read_text())
    assert index["metadata"] == {"total_size": 30}
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x01\x00",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{x",
        struct.pack("<Q", 11) + b'{"a":{"x":1',
        struct.pack("<Q", 61) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}       ',
    ],
)
def test_a_file_that_is_cut_off_is_corrupt(tmp_path: Path, payload: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(payload)
    with pytest.raises(Corrupt, match=r"model\.safetensors"):
        read_headers(tmp_path)


def test_no_weights_and_doubled_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No .*safetensors"):
        policy_digest(tmp_path)
    one = write_tensors(tmp_path, {"a": RawTensor("U8", (1,), b"x")}, max_file_bytes=9)
    one[0].rename(tmp_path / "other.safetensors")
    write_tensors(tmp_path, {"a": RawTensor("U8", (1,), b"x")}, max_file_bytes=9)
    with pytest.raises(ValueError, match="Expected it once"):
        policy_digest(tmp_path)


def test_digests_are_pinned() -> None:
    # A change here makes every stored record unfindable: raise RECORD_SCHEMA_VERSION instead.
    assert request_digest("rollout", {"seed": "1", "x": 0.1}) == (
        "69843e2822455fb2bb2716dd42bb38f080845457d6fac1dfbc2ce340ab9406d5"
    )
    assert input_digest({"b": "2", "a": "1"}) == (
        "5f13efef7cdd95e7a0171a4cc6ef643955a42f10ad9dd98c6b2f1f4e6903f7f5"
    )


def test_an_environment_names_versions_and_no_host() -> None:
    found = environment.describe(["pyarrow", "no-such-package"])
    assert found["package:no-such-package"] == "absent"
    assert found["package:pyarrow"].split(".")[0].isdigit()
    assert len(found["code"]) == 64
    assert os.uname().nodename not in found.values()
    again = environment.describe(["no-such-package", "pyarrow", "pyarrow"])
    assert environment.digest(again) == environment.digest(found)
    assert environment.digest(found | {"python": "x"}) != environment.digest(found)


def test_errors_and_configs_survive_pickling() -> None:
    for name in ("NotFound", "AlreadyExists", "CommitUnknown", "Unavailable", "LeaseHeld"):
        error = getattr(errors, name)("what, expected, do")
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back)) == (type(error), str(error))
    config = StoreConfig(uri="s3://b/p", endpoint="http://h:1")
    assert pickle.loads(pickle.dumps(config)) == config
    assert StoreConfig.model_validate_json(config.model_dump_json()) == config
    assert (config.bucket, config.prefix, config.scheme) == ("b", "p", "s3")
