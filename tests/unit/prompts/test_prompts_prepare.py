"""What launch makes of the data sets: two shards, nothing in both, everything counted."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.object_store import ObjectStore
from tests.unit.prompts.conftest import Prepare

ReadRows = Callable[..., list[dict[str, Any]]]


def jsonl(path: Path, prompts: list[str], **options: Any) -> dict[str, Any]:
    """Writes a file of `prompts`, answered by their number, and returns its options."""
    rows = [{"prompt": prompt, "answer": str(index)} for index, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path), **options}


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt_id"] for row in rows]


def test_both_shards_are_stored_in_order_with_ids_of_their_set(
    tmp_path: Path, prepare_sets: Prepare, read_rows: ReadRows
):
    options = jsonl(tmp_path / "a.jsonl", ["p0", "p1", "p2"])
    inputs = prepare_sets({"kind": "jsonl", "name": "mine", "options": options, "held_out": 1})
    train, held_out = read_rows(inputs.train), read_rows(inputs.held_out)
    assert (inputs.train.rows, inputs.held_out.rows) == (2, 1)
    assert (inputs.sets[0].train_rows, inputs.sets[0].held_out_rows) == (2, 1)
    assert [row["answer"] for row in train] == sorted(row["answer"] for row in train)
    assert {row["answer"] for row in train + held_out} == {"0", "1", "2"}
    assert {row["domain"] for row in train + held_out} == {"mine"}
    assert all(name.startswith("mine/") for name in names(train + held_out))
    assert held_out[0]["group_id"] == "held-out-00000000"


def test_preparing_twice_writes_the_same_and_another_seed_cuts_another_split(
    tmp_path: Path, prepare_sets: Prepare, read_rows: ReadRows, store: ObjectStore
):
    options = jsonl(tmp_path / "a.jsonl", [f"p{i}" for i in range(50)])
    dataset = {"kind": "jsonl", "options": options, "held_out": 20}
    first = prepare_sets(dataset)
    keys = [entry.key for entry in store.list("")]
    assert prepare_sets(dataset) == first
    assert [entry.key for entry in store.list("")] == keys
    other = prepare_sets(dataset, seed=1)
    assert other.mixture_digest != first.mixture_digest
    assert set(names(read_rows(other.held_out))) != set(names(read_rows(first.held_out)))


def test_the_cut_does_not_depend_on_the_order_of_the_file(
    tmp_path: Path, prepare_sets: Prepare, read_rows: ReadRows
):
    rows = [json.dumps({"prompt": f"p{i}", "answer": str(i)}) for i in range(30)]
    held_out = []
    for name, lines in {"a": rows, "b": rows[::-1]}.items():
        (tmp_path / name).write_text("\n".join(lines))
        dataset = {"kind": "jsonl", "options": {"path": str(tmp_path / name)}, "held_out": 10}
        held_out.append(names(read_rows(prepare_sets(dataset).held_out)))
    assert held_out[0] == held_out[1]


def test_the_first_held_out_rows_come_from_all_sets(
    tmp_path: Path, prepare_sets: Prepare, read_rows: ReadRows
):
    sets = [
        {
            "kind": "jsonl",
            "name": name,
            "options": jsonl(tmp_path / name, [f"{name}{i}" for i in range(40)]),
            "held_out": 20,
        }
        for name in ("a", "b")
    ]
    inputs = prepare_sets(*sets)
    first = [row["domain"] for row in read_rows(inputs.held_out)[:20]]
    # Hypergeometric: fewer than 4 of one set among 20 happens once in 10,000 seeds.
    assert 4 <= first.count("a") <= 16
    domains = [row["domain"] for row in read_rows(inputs.train)]
    assert domains == ["a"] * 20 + ["b"] * 20


def test_t11_a_prompt_without_room_for_an_answer_is_dropped_counted_and_named(
    tmp_path: Path,
    prepare_sets: Prepare,
    read_rows: ReadRows,
    caplog: pytest.LogCaptureFixture,
):
    options = jsonl(tmp_path / "a.jsonl", ["x" * 100, "x" * 8128, "y" * 90])
    with caplog.at_level(logging.WARNING):
        inputs = prepare_sets(
            {"kind": "jsonl", "options": options}, limit=6000, template=False, groups_per_step=2
        )
    rows = read_rows(inputs.train)
    assert [len(row["prompt_token_ids"]) for row in rows] == [100, 90]
    assert [row["answer"] for row in rows] == ["0", "2"], "each with its own prompt"
    assert inputs.sets[0].dropped == {"too_long": 1}
    assert "dropped 1 of 3 prompts, longer than 6000 tokens" in caplog.text
    assert "a.jsonl line 2 (8128 tokens)" in caplog.text


def test_the_limit_counts_the_template_too(tmp_path: Path, prepare_sets: Prepare):
    options = jsonl(tmp_path / "a.jsonl", ["xxxx", "xxx"])
    inputs = prepare_sets({"kind": "jsonl", "options": options}, limit=5)
    assert inputs.sets[0].dropped == {"too_long": 1}, "<user>xxxx<assistant> has 6 tokens"
    with pytest.raises(ValueError, match="has no prompt of at most 4 tokens"):
        prepare_sets({"kind": "jsonl", "options": options}, limit=5, max_prompt_tokens=4)


def test_training_prompts_that_are_held_out_too_are_dropped_across_sets(
    tmp_path: Path,
    prepare_sets: Prepare,
    read_rows: ReadRows,
    caplog: pytest.LogCaptureFixture,
):
    jsonl(tmp_path / "test.jsonl", ["same", "new"])
    options = jsonl(tmp_path / "a.jsonl", ["x", "y", "same"])
    other = jsonl(tmp_path / "b.jsonl", ["z", "same", "new"])
    inputs = prepare_sets(
        {
            "kind": "jsonl",
            "name": "a",
            "options": options | {"held_out_path": str(tmp_path / "test.jsonl")},
        },
        {"kind": "jsonl", "name": "b", "options": other},
    )
    train = {tuple(row["prompt_token_ids"]) for row in read_rows(inputs.train)}
    held_out = {tuple(row["prompt_token_ids"]) for row in read_rows(inputs.held_out)}
    assert len(held_out) == 2
    assert not train & held_out
    assert [found.dropped for found in inputs.sets] == [{"held_out": 1}, {"held_out": 2}]
    assert [found.train_rows for found in inputs.sets] == [2, 1]
    assert "data set b: dropped 2 training prompts that are held out too" in caplog.text


def test_one_text_under_two_ids_is_never_on_both_sides_of_a_cut(
    tmp_path: Path, prepare_sets: Prepare, read_rows: ReadRows
):
    options = jsonl(tmp_path / "a.jsonl", [f"p{i % 20}" for i in range(40)])
    inputs = prepare_sets({"kind": "jsonl", "options": options, "held_out": 10})
    train = {tuple(row["prompt_token_ids"]) for row in read_rows(inputs.train)}
    held_out = {tuple(row["prompt_token_ids"]) for row in read_rows(inputs.held_out)}
    assert inputs.held_out.rows == 10
    assert not train & held_out
    assert inputs.sets[0].train_rows == 30 - inputs.sets[0].dropped["held_out"]


def test_a_training_set_that_is_all_held_out_is_refused(tmp_path: Path, prepare_sets: Prepare):
    options = jsonl(tmp_path / "a.jsonl", ["x", "y"])
    with pytest.raises(ValueError, match="Every training prompt of data set 'jsonl' is held out"):
        prepare_sets({"kind": "jsonl", "options": options | {"held_out_path": options["path"]}})


def test_holding_out_everything_is_refused(tmp_path: Path, prepare_sets: Prepare):
    options = jsonl(tmp_path / "a.jsonl", ["x", "y"])
    with pytest.raises(ValueError, match=r"has 2 rows, and held_out asks for 2"):
        prepare_sets({"kind": "jsonl", "options": options, "held_out": 2})


def test_a_set_with_its_own_held_out_rows_cannot_be_cut(prepare_sets: Prepare):
    with pytest.raises(ValueError, match=r"'addition' brings 800 held-out rows of its own"):
        prepare_sets({"kind": "addition", "held_out": 5}, template=False)


def test_a_step_larger_than_the_set_is_refused(tmp_path: Path, prepare_sets: Prepare):
    options = jsonl(tmp_path / "a.jsonl", ["x", "y", "z"])
    prepare_sets({"kind": "jsonl", "options": options}, groups_per_step=3)
    with pytest.raises(ValueError, match=r"groups_per_step is 4, of which up to 4 .* 3 training"):
        prepare_sets({"kind": "jsonl", "options": options}, groups_per_step=4)


def test_a_step_that_takes_too_many_of_one_set_of_the_mixture_is_refused(
    tmp_path: Path, prepare_sets: Prepare
):
    small = {"kind": "jsonl", "name": "s", "options": jsonl(tmp_path / "s", ["x", "y", "z"])}
    large = {
        "kind": "jsonl",
        "name": "l",
        "weight": 9.0,
        "options": jsonl(tmp_path / "l", [f"p{i}" for i in range(60)]),
    }
    prepare_sets(small, large, groups_per_step=20)
    with pytest.raises(ValueError, match=r"from data set 's', which has 3 training rows"):
        prepare_sets(small, large, groups_per_step=50)


def test_everything_that_decides_a_draw_is_in_the_mixture_digest(
    tmp_path: Path, prepare_sets: Prepare
):
    options = jsonl(tmp_path / "a.jsonl", ["x", "y", "z"])
    other = jsonl(tmp_path / "b.jsonl", ["u", "v"])

    def digest(weight: float, name: str) -> str:
        return prepare_sets(
            {"kind": "jsonl", "name": name, "options": options},
            {"kind": "jsonl", "name": "b", "options": other, "weight": weight},
        ).mixture_digest

    assert len({digest(1.0, "a"), digest(2.0, "a"), digest(1.0, "c")}) == 3
    assert digest(1.0, "a") == digest(1.0, "a")
