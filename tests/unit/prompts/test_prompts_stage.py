"""The stage: the groups of one step as a shard and a record, found again by request."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.layout import StepScope
from storage.object_store import ObjectStore
from storage.records import Cursor, PromptInputs
from tasks.prompts.contract import PromptsRequest, PromptsResult
from tasks.prompts.stage import held_out_rows, run
from tests.unit.prompts.conftest import Prepare

ReadRows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def inputs(tmp_path: Path, prepare_sets: Prepare) -> PromptInputs:
    sets: list[dict[str, Any]] = []
    for name, count in {"a": 6, "b": 4}.items():
        path = tmp_path / name
        rows = [{"prompt": f"{name}{i}", "answer": str(i), "hint": i} for i in range(count)]
        path.write_text("\n".join(json.dumps(row) for row in rows))
        options = {"path": str(path), "extra_fields": ["hint"]}
        sets.append({"kind": "jsonl", "name": name, "options": options, "weight": float(count)})
    return prepare_sets(*sets)


def request(inputs: PromptInputs, **changes: Any) -> PromptsRequest:
    settings: dict[str, Any] = {
        "scope": StepScope(run="test", step=1),
        "seed": 3,
        "inputs": inputs,
        "cursor": Cursor(),
        "num_groups": 4,
    }
    return PromptsRequest(**(settings | changes))


def draw_steps(
    store: ObjectStore,
    inputs: PromptInputs,
    sizes: list[int],
    *,
    start: PromptsResult | None = None,
) -> list[PromptsResult]:
    results: list[PromptsResult] = [start] if start else []
    for size in sizes:
        step = len(results) + 1
        cursor = results[-1].cursor if results else Cursor()
        scope = StepScope(run="test", step=step)
        results.append(run(request(inputs, scope=scope, cursor=cursor, num_groups=size), store))
    return results


def test_the_shard_holds_the_rows_that_were_drawn_whole(
    store: ObjectStore, inputs: PromptInputs, read_rows: ReadRows
):
    result = run(request(inputs), store)
    shard = result.record.outputs["prompts"]
    stored = {row["prompt_id"]: row for row in read_rows(inputs.train)}
    rows = read_rows(shard)
    assert shard.rows == len(rows) == 4
    for row in rows:
        assert row | {"group_id": ""} == stored[row["prompt_id"]] | {"group_id": ""}
        assert json.loads(row["extra"]) == {"hint": int(row["answer"])}
    assert result.cursor.drawn == 4
    assert not result.reused


def test_a_second_call_finds_the_record_and_writes_nothing(
    store: ObjectStore, inputs: PromptInputs
):
    first = run(request(inputs), store)
    keys = [entry.key for entry in store.list("")]
    second = run(request(inputs), store)
    assert second == first.model_copy(update={"reused": True})
    assert [entry.key for entry in store.list("")] == keys


def test_the_bytes_follow_from_the_request_and_not_from_run_or_step(
    store: ObjectStore, inputs: PromptInputs
):
    first = run(request(inputs), store).record
    other = run(request(inputs, scope=StepScope(run="other", step=9)), store).record
    assert other.request_digest == first.request_digest
    assert other.outputs["prompts"].sha256 == first.outputs["prompts"].sha256
    assert other.outputs["prompts"].key != first.outputs["prompts"].key


def test_every_part_of_the_request_that_decides_the_draw_changes_its_digest(
    inputs: PromptInputs,
):
    digests = {
        request(inputs).digest(),
        request(inputs, seed=4).digest(),
        request(inputs, cursor=Cursor(drawn=4)).digest(),
        request(inputs, round=1).digest(),
        request(inputs, num_groups=5).digest(),
        request(inputs.model_copy(update={"mixture_digest": "other"})).digest(),
    }
    assert len(digests) == 6
    assert request(inputs, scope=StepScope(run="x", step=7)).digest() in digests


def test_a32_a_prompt_drawn_twice_makes_two_groups(
    store: ObjectStore, inputs: PromptInputs, read_rows: ReadRows
):
    results = draw_steps(store, inputs, [4] * 10)
    rows = [row for result in results for row in read_rows(result.record.outputs["prompts"])]
    assert max(Counter(row["prompt_id"] for row in rows).values()) > 1
    assert len({row["group_id"] for row in rows}) == len(rows)


def test_rounds_of_one_step_have_their_own_prompts_and_groups(
    store: ObjectStore, inputs: PromptInputs, read_rows: ReadRows
):
    rounds = [run(request(inputs, round=number, num_groups=2), store) for number in range(3)]
    rows = [row for result in rounds for row in read_rows(result.record.outputs["prompts"])]
    assert len({row["prompt_id"] for row in rows}) == 6
    assert len({row["group_id"] for row in rows}) == 6
    assert [result.cursor.drawn for result in rounds] == [2, 4, 6]


def test_s22_killed_after_step_three_the_epoch_still_uses_each_prompt_once(
    store: ObjectStore, prepare_sets: Prepare, read_rows: ReadRows, tmp_path: Path
):
    path = tmp_path / "ten.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"p{i}", "answer": "1"}) for i in range(10)))
    inputs = prepare_sets({"kind": "jsonl", "options": {"path": str(path)}})
    before = draw_steps(store, inputs, [2, 2, 2])
    cursor = Cursor.from_bytes(before[-1].cursor.to_bytes())
    after = []
    for step in (4, 5):
        scope = StepScope(run="test", step=step)
        result = run(request(inputs, scope=scope, cursor=cursor, num_groups=2), store)
        cursor, after = result.cursor, [*after, result]
    drawn = [
        row for result in before + after for row in read_rows(result.record.outputs["prompts"])
    ]
    everything = [row["prompt_id"] for row in read_rows(inputs.train)]
    assert sorted(row["prompt_id"] for row in drawn) == sorted(everything)


def test_a_step_larger_than_the_data_is_refused_before_anything_is_written(
    store: ObjectStore, inputs: PromptInputs
):
    keys = [entry.key for entry in store.list("")]
    with pytest.raises(ValueError, match="A step asks for more groups"):
        run(request(inputs, num_groups=11), store)
    assert [entry.key for entry in store.list("")] == keys


def test_evaluations_take_the_first_held_out_rows(prepare_sets: Prepare):
    inputs = prepare_sets({"kind": "addition"}, template=False)
    assert held_out_rows(inputs) == range(800)
    assert held_out_rows(inputs, limit=100) == range(100)
    assert held_out_rows(inputs, limit=1000) == range(800)
