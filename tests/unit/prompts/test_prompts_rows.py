"""Files of rows: what is read, and what is refused with file and line."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.prompts.contract import DatasetConfig, PromptsConfig
from tasks.prompts.opening import check_options, read_rows
from tasks.prompts.rows import Rows

GOOD = [
    {"prompt": "one", "answer": "1", "key": 7, "level": "easy"},
    {"prompt": [{"role": "user", "content": "two"}], "answer": "2", "key": 8, "level": None},
]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(kind: str, **options: Any) -> Rows:
    return read_rows(DatasetConfig(kind=kind, options=options))


def test_jsonl_rows_keep_order_ids_and_extra_fields(tmp_path: Path):
    path = write_jsonl(tmp_path / "data.jsonl", GOOD)
    rows = read("jsonl", path=path, id_field="key", extra_fields=["level"]).train
    assert [row.prompt for row in rows] == [GOOD[0]["prompt"], GOOD[1]["prompt"]]
    assert [(row.answer, row.row_id) for row in rows] == [("1", "7"), ("2", "8")]
    assert [row.extra for row in rows] == [{"level": "easy"}, {"level": None}]
    assert rows[1].where == f"{path} line 2"


def test_an_id_without_id_field_follows_from_the_content_alone(tmp_path: Path):
    path = write_jsonl(tmp_path / "data.jsonl", GOOD)
    other = write_jsonl(tmp_path / "other.jsonl", GOOD[::-1])
    ids = [row.row_id for row in read("jsonl", path=path).train]
    assert ids == [row.row_id for row in read("jsonl", path=other).train][::-1]
    assert len(set(ids)) == 2


def test_line_separators_inside_a_string_are_no_new_line(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_bytes('{"prompt": "a\u2028b\x85c", "answer": "1"}\r\n\r\n'.encode())
    assert [row.prompt for row in read("jsonl", path=path).train] == ["a\u2028b\x85c"]


def test_fields_have_the_names_that_the_config_gives(tmp_path: Path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"question": "q"}])
    rows = read("jsonl", path=path, prompt_field="question", answer_field=None).train
    assert (rows[0].prompt, rows[0].answer) == ("q", None)


TURN = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "answer": ', r"line 2 is not JSON"),
        pytest.param(
            '{"prompt": "a", "answer": "1", "x": %s}' % ("[" * 9999 + "]" * 9999),
            "line 2 is nested too",
            id="deep",
        ),
        ("[1]", r"line 2 is a JSON list"),
        ('{"prompt": "a"}', r"line 2 has no field 'answer'.*answer_field"),
        ('{"prompt": "", "answer": "1"}', r"line 2: 'prompt' is empty"),
        ('{"prompt": " \\n", "answer": "1"}', r"line 2: 'prompt' is empty"),
        ('{"prompt": 5, "answer": "1"}', r"line 2: 'prompt' is 5 \(int\)"),
        ('{"prompt": [], "answer": "1"}', r"line 2: 'prompt' is \[\] \(list\)"),
        ('{"prompt": "a", "answer": 1}', r"line 2: 'answer' is 1 \(int\). Expected a string"),
        ('{"prompt": "a", "answer": null}', r"line 2: 'answer' is None"),
        ('{"prompt": "\\ud800", "answer": "1"}', r"line 2: 'prompt' holds half of a surrogate"),
        ('{"prompt": "first", "answer": "1"}', r"line 2 repeats the id .* of .*line 1"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', r"line 2: a turn of 'prompt' is"),
        (
            '{"prompt": [{"role": "robot", "content": "x"}], "answer": "1"}',
            r"line 2: a turn of 'prompt' has role 'robot'",
        ),
        (
            '{"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}',
            r"line 2: the last turn of 'prompt' is .*Expected a user turn",
        ),
        (
            '{"prompt": [{"role": "user", "content": " "}], "answer": "1"}',
            r"line 2: the last turn of 'prompt' is",
        ),
    ],
)
def test_t17_a_bad_line_is_refused_with_file_and_number(tmp_path: Path, line: str, message: str):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "first", "answer": "1"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"data\.jsonl " + message):
        read("jsonl", path=path)


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"data\.jsonl line 1 is not JSON"):
        read("jsonl", path=path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_missing_or_empty_file_is_named(tmp_path: Path, kind: str):
    with pytest.raises(ValueError, match="gone cannot be read"):
        read(kind, path=tmp_path / "gone")
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    with pytest.raises(ValueError, match="empty"):
        read(kind, path=empty)


def test_a_repeated_id_names_both_rows(tmp_path: Path):
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD[0], GOOD[1] | {"key": "7"}])
    with pytest.raises(ValueError, match=r"line 2 repeats the id '7' of .*line 1"):
        read("jsonl", path=path, id_field="key")


def test_a_held_out_file_may_count_its_ids_from_the_start(tmp_path: Path):
    path = write_jsonl(tmp_path / "train.jsonl", GOOD)
    test = write_jsonl(tmp_path / "test.jsonl", [{"prompt": "new", "answer": "3", "key": 7}])
    rows = read("jsonl", path=path, held_out_path=test, id_field="key")
    assert rows.held_out is not None
    assert [row.row_id for row in rows.held_out] == ["7"]


def test_parquet_and_jsonl_read_the_same_rows(tmp_path: Path):
    rows = [{"prompt": f"p{i}", "answer": str(i), "key": i} for i in range(10)]
    turns = [[{"role": "user", "content": f"p{i}", "note": None}] for i in range(10)]
    directory = tmp_path / "parts"
    directory.mkdir()
    pq.write_table(pa.Table.from_pylist(rows[:4]), directory / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows[4:]), directory / "b.parquet")
    lines = read("jsonl", path=write_jsonl(tmp_path / "x.jsonl", rows), id_field="key").train
    found = read("parquet", path=directory, id_field="key").train
    assert [(row.prompt, row.answer, row.row_id) for row in found] == [
        (row.prompt, row.answer, row.row_id) for row in lines
    ]
    assert found[4].where == f"{directory / 'b.parquet'} row 1"
    chats = [{"prompt": turn, "answer": "1"} for turn in turns]
    pq.write_table(pa.Table.from_pylist(chats), tmp_path / "chats.parquet")
    found = read("parquet", path=tmp_path / "chats.parquet").train
    assert found[3].prompt == [{"role": "user", "content": "p3"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a", "answer": "1"}, r"no column 'prompt'.*'question', 'answer'"),
        ({"prompt": "a", "answer": 1}, r"row 1: 'answer' is 1 \(int\)"),
        ({"prompt": "", "answer": "1"}, r"row 1: 'prompt' is empty"),
    ],
)
def test_bad_parquet_rows_are_refused_with_their_number(
    tmp_path: Path, row: dict[str, Any], message: str
):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=r"data\.parquet .*" + message):
        read("parquet", path=tmp_path / "data.parquet")


def test_an_extra_field_that_json_cannot_hold_is_refused(tmp_path: Path):
    row = {"prompt": "a", "answer": "1", "blob": b"\x00"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=r"row 1 has an extra field that JSON cannot hold"):
        read("parquet", path=tmp_path / "data.parquet", extra_fields=["blob"])


def test_huggingface_reads_a_saved_directory_with_its_splits(tmp_path: Path):
    splits = {
        "train": datasets.Dataset.from_list([{"q": "a", "a": "1"}, {"q": "b", "a": "2"}]),
        "test": datasets.Dataset.from_list([{"q": "c", "a": "3"}]),
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    options = {"path": str(tmp_path / "saved"), "prompt_field": "q", "answer_field": "a"}
    rows = read("huggingface", held_out_split="test", **options)
    assert [(row.prompt, row.answer) for row in rows.train] == [("a", "1"), ("b", "2")]
    assert rows.held_out is not None
    assert [row.prompt for row in rows.held_out] == ["c"]
    with pytest.raises(ValueError, match=r"has the splits \['test', 'train'\], not 'validation'"):
        read("huggingface", split="validation", **options)
    with pytest.raises(ValueError, match=r"split 'train' has no column 'prompt'.*\['q', 'a'\]"):
        read("huggingface", path=options["path"])


def test_huggingface_reads_one_saved_split_and_refuses_another(tmp_path: Path):
    split = datasets.Dataset.from_list([{"prompt": "a", "answer": "1"}])
    split.save_to_disk(str(tmp_path / "saved"))
    assert len(read("huggingface", path=str(tmp_path / "saved")).train) == 1
    with pytest.raises(ValueError, match="holds one split, saved without a name"):
        read("huggingface", path=str(tmp_path / "saved"), held_out_split="test")


def test_a_hub_name_that_does_not_open_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    # What HF_HUB_OFFLINE=1 sets; with it the library gives up at once instead of in 20 s.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'rollbook-tests/no-such-set'.*did not open.*save_to"):
        read("huggingface", path="rollbook-tests/no-such-set")


def test_unknown_kinds_and_options_are_refused_without_reading():
    with pytest.raises(ValueError, match=r"no data set kind 'jsonll'. Did you mean one of"):
        check_options(PromptsConfig(datasets=[DatasetConfig(kind="jsonll")]))
    with pytest.raises(ValueError, match="paht"):
        check_options(PromptsConfig(datasets=[DatasetConfig(kind="jsonl", options={"paht": "x"})]))
    tasks = DatasetConfig(kind="reasoning_gym", options={"dataset": "chain_sums"})
    tasks = DatasetConfig(kind="reasoning_gym", options={"dataset": "chain_sums"})
    with pytest.raises(ValueError, match=r"no data set 'chain_sums'. Near: \['chain_sum'"):
        check_options(PromptsConfig(datasets=[tasks]))


def test_two_sets_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"names \['addition'\] more than once"):
        PromptsConfig(datasets=[DatasetConfig(kind="addition"), DatasetConfig(kind="addition")])
