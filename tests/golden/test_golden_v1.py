"""What schema version 1 wrote stays readable, and is written again to the same bytes."""

from pathlib import Path

import pyarrow as pa
import pytest

from storage.experience import decode_shard, encode_shard
from storage.signing import check_signature
from tests.golden.make_v1 import SHARDS, SIGNER, encode_all, make_records

FOLDER = Path(__file__).parent / "v1"


@pytest.mark.parametrize("name", list(SHARDS))
def test_a_shard_of_version_1_is_read_and_encoded_to_the_same_bytes(name: str) -> None:
    rows, schema = SHARDS[name]
    stored = (FOLDER / name).read_bytes()
    table = decode_shard(stored, schema=schema, name=name)
    assert table.to_pylist() == pa.Table.from_pylist(rows, schema=schema).to_pylist()
    assert encode_shard(table, schema=schema) == stored


@pytest.mark.parametrize("name", list(make_records()))
def test_a_record_of_version_1_is_read_and_encoded_to_the_same_bytes(name: str) -> None:
    record = make_records()[name]
    stored = (FOLDER / name).read_bytes()
    found = type(record).from_bytes(stored)
    assert found.to_bytes() == stored
    assert found.model_dump(mode="json") == record.model_dump(mode="json")


def test_a_signature_of_version_1_stays_good() -> None:
    stored = (FOLDER / "signed-commit.json").read_bytes()
    assert check_signature(stored, SIGNER.public_key()).verdict == "good"


def test_every_golden_file_is_what_the_same_rows_give_today() -> None:
    today = encode_all()
    assert {path.name for path in FOLDER.iterdir()} == set(today)
    assert {path.name: path.read_bytes() for path in FOLDER.iterdir()} == today
