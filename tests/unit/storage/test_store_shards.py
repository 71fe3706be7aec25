"""Shards: declared schemas, the same bytes for the same rows, and nothing lost on the way."""

import math
import pickle
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import Corrupt
from storage.experience import ROW_GROUP_ROWS, decode_shard, encode_shard, rows_to_table
from storage.schemas import PROMPTS, REWARDS, SAMPLES, SCHEMAS, TRAIN

SPAN = {"start": 0, "policy_version": 3, "policy_digest": "d3"}


def sample(index: int, **changes: Any) -> dict[str, Any]:
    row = {
        "sample_id": f"s{index}",
        "group_id": f"g{index // 8}",
        "sample_index": index % 8,
        "prompt_token_ids": [1, 2, 3],
        "completion_token_ids": [index, 2],
        "completion_mask": [True, False],
        "rollout_logprobs": [-12.34, None],
        "finish_reason": "stop",
        "stop_token_id": 2,
        "seed": 2**62 + index,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 16,
        "version_spans": [SPAN],
    }
    return row | changes


def reward(index: int, **changes: Any) -> dict[str, Any]:
    part = {"name": "exact", "value": 1.0, "weight": 1.0, "status": "graded", "reason": None}
    row = {
        "sample_id": f"s{index}",
        "reward": 1.0,
        "status": "graded",
        "reason": None,
        "parts": [part],
    }
    return row | changes


def test_samples_make_the_round_trip() -> None:
    rows = [sample(index) for index in range(20)]
    table = rows_to_table(rows, schema=SAMPLES)
    back = decode_shard(encode_shard(table, schema=SAMPLES), schema=SAMPLES)
    assert back == table
    assert back.schema == SAMPLES
    assert back.schema.metadata is None


def test_logprobs_keep_float32() -> None:
    # new - old = -12.34 - -12.3 = -0.04, exp(-0.04) = 0.960789; in bfloat16 both are -12.3125.
    table = rows_to_table([sample(0, rollout_logprobs=[-12.34, -12.3])], schema=SAMPLES)
    back = decode_shard(encode_shard(table, schema=SAMPLES), schema=SAMPLES)
    new, old = back.column("rollout_logprobs").to_pylist()[0]
    assert math.exp(new - old) == pytest.approx(0.960789, abs=1e-6)
    for schema in (SAMPLES.field("rollout_logprobs"), TRAIN.field("learner_logprobs")):
        assert schema.type.value_type == pa.float32()


def test_s15_missing_values_in_one_shard_do_not_change_its_types() -> None:
    empty = rows_to_table([reward(0, reward=None, parts=[], status="x")] * 2, schema=REWARDS)
    full = rows_to_table([reward(1)], schema=REWARDS)
    shards = [encode_shard(table, schema=REWARDS) for table in (empty, full)]
    files = [pq.ParquetFile(pa.BufferReader(shard)) for shard in shards]
    assert files[0].schema_arrow == files[1].schema_arrow == REWARDS
    both = pa.concat_tables([decode_shard(shard, schema=REWARDS) for shard in shards])
    assert both.column("reward").to_pylist() == [None, None, 1.0]


@pytest.mark.parametrize(
    ("column", "kind"),
    [("prompt_token_ids", pa.list_(pa.int64())), ("rollout_logprobs", pa.list_(pa.float64()))],
)
def test_s16_a_foreign_type_is_refused_by_column(column: str, kind: pa.DataType) -> None:
    table = rows_to_table([sample(0)], schema=SAMPLES)
    at = SAMPLES.get_field_index(column)
    foreign = table.set_column(at, column, table.column(column).cast(kind))
    with pytest.raises(ValueError, match=f"Column '{column}' is list<"):
        encode_shard(foreign, schema=SAMPLES)


def test_a_missing_or_extra_column_is_refused() -> None:
    table = rows_to_table([sample(0)], schema=SAMPLES)
    for odd in (table.drop_columns(["seed"]), table.append_column("host", pa.array(["h"]))):
        with pytest.raises(ValueError, match="Columns are"):
            encode_shard(odd, schema=SAMPLES)


def test_a_null_where_it_must_be_known_is_refused() -> None:
    loose = pa.schema([field.with_nullable(True) for field in SAMPLES])
    table = pa.Table.from_pylist([sample(0, seed=None), sample(1)], schema=loose)
    with pytest.raises(ValueError, match="'seed' has 1 nulls in 2 rows"):
        encode_shard(table, schema=SAMPLES)


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_s17_a_shard_without_rows_is_a_shard(name: str) -> None:
    schema = SCHEMAS[name]
    back = decode_shard(encode_shard(schema.empty_table(), schema=schema), schema=schema)
    assert back.num_rows == 0
    assert back.schema == schema


@pytest.mark.parametrize(
    "text", ["a\x00b", "\ud800 lone surrogate", "\u202e reversed", "\U0001f600"]
)
def test_odd_characters_are_stored_and_ids_unchanged(text: str) -> None:
    prompt = {
        "prompt_id": "p",
        "group_id": "g",
        "domain": "d",
        "prompt_token_ids": [0, 5],
        "answer": text,
        "extra": "{}",
    }
    part = {"name": "n", "value": None, "weight": 1.0, "status": "grader_error", "reason": text}
    graded = reward(0, reason=text, parts=[part])
    expected = text.encode("utf-8", "backslashreplace").decode()
    for row, schema in ((prompt, PROMPTS), (graded, REWARDS)):
        table = rows_to_table([row], schema=schema)
        back = decode_shard(encode_shard(table, schema=schema), schema=schema).to_pylist()[0]
        assert expected in (back.get("answer"), back.get("reason"))
        assert back.get("prompt_token_ids", [0, 5]) == [0, 5]
    assert back["parts"][0]["reason"] == expected
    assert expected == text or "\\ud800" in expected


def test_bytes_follow_rows_not_chunks_threads_or_processes() -> None:
    rows = [sample(index) for index in range(50)]
    whole = rows_to_table(rows, schema=SAMPLES)
    chunks = pa.concat_tables(
        rows_to_table(rows[i : i + 7], schema=SAMPLES) for i in range(0, 50, 7)
    )
    labelled = whole.replace_schema_metadata({"host": "here"})
    encoded = encode_shard(whole, schema=SAMPLES)
    assert encode_shard(chunks, schema=SAMPLES) == encoded
    assert encode_shard(labelled, schema=SAMPLES) == encoded
    assert encode_shard(pa.concat_tables([whole, whole]).slice(50), schema=SAMPLES) == encoded
    script = (
        "import sys, pickle\n"
        "from storage.experience import encode_shard, rows_to_table\n"
        "from storage.schemas import SAMPLES\n"
        "rows = pickle.load(sys.stdin.buffer)\n"
        "table = rows_to_table(rows, schema=SAMPLES)\n"
        "sys.stdout.buffer.write(encode_shard(table, schema=SAMPLES))\n"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(rows), capture_output=True, check=True
    )
    assert other.stdout == encoded


def test_row_groups_have_a_fixed_size_and_settings_hold() -> None:
    rows = [sample(index) for index in range(ROW_GROUP_ROWS + 1)]
    encoded = encode_shard(rows_to_table(rows, schema=SAMPLES), schema=SAMPLES)
    metadata = pq.ParquetFile(pa.BufferReader(encoded)).metadata
    assert [metadata.row_group(i).num_rows for i in range(2)] == [ROW_GROUP_ROWS, 1]
    columns = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
    by_path = {column.path_in_schema: column for column in columns}
    assert {column.compression for column in columns} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in by_path["rollout_logprobs.list.element"].encodings
    assert by_path["version_spans.list.element.policy_digest"].has_dictionary_page
    assert metadata.metadata is None


def test_bytes_that_are_no_parquet_are_corrupt_by_name() -> None:
    with pytest.raises(Corrupt, match="key/x is not a Parquet file"):
        decode_shard(b"PAR1 not", schema=SAMPLES, name="key/x")


FLOATS = st.floats(width=32, allow_nan=False)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "sample_id": st.text(),
                "group_id": st.text(max_size=3),
                "advantage": st.none() | st.floats(allow_nan=False),
                "kept": st.booleans(),
                "reason": st.none() | st.text(),
                "learner_logprobs": st.none() | st.lists(st.none() | FLOATS, max_size=5),
            }
        ),
        max_size=8,
    )
)
def test_any_rows_come_back_and_encode_to_the_same_bytes(rows: list[dict[str, Any]]) -> None:
    table = rows_to_table(rows, schema=TRAIN)
    encoded = encode_shard(table, schema=TRAIN)
    back = decode_shard(encoded, schema=TRAIN)
    assert back.to_pylist() == table.to_pylist()
    assert encode_shard(back, schema=TRAIN) == encoded
