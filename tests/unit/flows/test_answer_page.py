import csv
import io
import json
from typing import Any

import pyarrow as pa
import pytest

from flows.answer_page import print_answer, write_csv, write_json


def answer(rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> pa.RecordBatchReader:
    table = pa.Table.from_pylist(rows, schema=schema)
    return table.to_reader(max_chunksize=7)


def printed(
    rows: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int | None = 80,
) -> list[str]:
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    print_answer(answer(rows))
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_numbers_are_aligned_and_rows_counted(capsys, monkeypatch):
    rows = [{"step": 1, "reward": 0.5, "why": None}, {"step": 10, "reward": 1 / 3, "why": "wrong"}]
    assert printed(rows, capsys, monkeypatch) == [
        "step    reward  why",
        "   1       0.5  -",
        "  10  0.333333  wrong",
        "2 rows",
    ]


def test_no_rows_still_say_their_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_answer(answer([], pa.schema([("step", pa.int64()), ("kind", pa.string())])))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "step  kind",
        "0 rows",
    ]


def test_long_text_is_cut_and_numbers_are_not(capsys, monkeypatch):
    rows = [{"text": "word " * 40, "count": 123456789, "more": "x" * 100}]
    shown = printed(rows, capsys, monkeypatch)
    assert max(map(len, shown)) <= 80
    assert "123456789" in shown[1]
    assert shown[1].count("…") == 2


def test_a_hundred_rows_are_shown_and_all_counted(capsys, monkeypatch):
    shown = printed([{"step": step} for step in range(2500)], capsys, monkeypatch)
    assert shown[100].strip() == "99"
    assert shown[101] == "the first 100 of 2,500 rows; --csv or --json print them all"
    assert len(shown) == 102


def test_columns_that_do_not_fit_stand_one_below_the_other(capsys, monkeypatch):
    rows = [{f"a_long_name_{number}": "text" for number in range(9)} for _ in range(11)]
    shown = printed(rows, capsys, monkeypatch)
    assert shown[:3] == ["row 1", "a_long_name_0  text", "a_long_name_1  text"]
    assert shown[-1] == "the first 10 of 11 rows; --csv or --json print them all"


def test_what_goes_into_a_pipe_is_not_cut_to_a_screen(capsys, monkeypatch):
    rows = [{f"a_long_name_{number}": "text" for number in range(20)}]
    shown = printed(rows, capsys, monkeypatch, width=None)
    assert len(shown) == 3
    assert shown[0].endswith("a_long_name_19")


def test_text_of_a_model_does_not_steer_the_terminal(capsys, monkeypatch):
    rows = [{"a\x1b[2J": "b\x1b[31m\u202e\n[bold]c[/bold] :smile:", "list": ["\x07"]}]
    shown = printed(rows, capsys, monkeypatch)
    assert shown[0].startswith("a\\x1b[2J")
    assert shown[1].startswith("b\\x1b[31m\\u202e\\n[bold]c[/bold] :smile:")
    assert '["\\u0007"]' in shown[1]


def test_wide_characters_keep_columns_aligned(capsys, monkeypatch):
    shown = printed([{"a": "漢字", "b": 1}, {"a": "x", "b": 2}], capsys, monkeypatch)
    assert shown[1:3] == ["漢字  1", "x     2"]


def test_json_has_every_row_and_no_number_that_is_none():
    rows = [{"step": step, "value": float("nan"), "tags": [1, None]} for step in range(20)]
    stream = io.StringIO()
    write_json(answer(rows), stream)
    loaded = json.loads(stream.getvalue())
    assert len(loaded) == 20
    assert loaded[3] == {"step": 3, "value": None, "tags": [1, None]}
    assert stream.getvalue().count("\n") == 22


def test_json_of_no_rows_is_an_empty_list():
    stream = io.StringIO()
    write_json(answer([], pa.schema([("step", pa.int64())])), stream)
    assert json.loads(stream.getvalue()) == []


def test_maps_are_objects_in_json():
    schema = pa.schema([("metrics", pa.map_(pa.string(), pa.float64()))])
    stream = io.StringIO()
    write_json(answer([{"metrics": [("loss", 0.5)]}], schema), stream)
    assert json.loads(stream.getvalue()) == [{"metrics": {"loss": 0.5}}]


def test_csv_has_a_header_every_row_and_nested_values_as_json():
    rows = [{"step": step, "text": 'a "b",\nc', "tags": [1.5], "none": None} for step in range(9)]
    stream = io.StringIO()
    write_csv(answer(rows), stream)
    read = list(csv.reader(io.StringIO(stream.getvalue())))
    assert read[0] == ["step", "text", "tags", "none"]
    assert read[9] == ["8", 'a "b",\nc', "[1.5]", ""]
