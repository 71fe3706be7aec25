"""Groups of a step drawn again: what a changed shard, cursor or seed looks like to an auditor."""

import json
from pathlib import Path
from typing import Any

import pytest

from storage.audit_findings import EXACTLY_ONCE, REPLAY, Tally
from storage.experience import read_shard, rows_to_table, write_shard
from storage.layout import StepScope
from storage.ledger import record_ref
from storage.object_store import ObjectStore
from storage.records import Cursor, PromptInputs, StageRecord
from storage.schemas import PROMPTS
from tasks.prompts.audit import audit_prompts
from tasks.prompts.contract import PromptsRequest, PromptsResult
from tasks.prompts.stage import run
from tests.unit.prompts.conftest import Prepare

SCOPE = StepScope(run="test", step=1)


@pytest.fixture
def inputs(tmp_path: Path, prepare_sets: Prepare) -> PromptInputs:
    rows = [{"prompt": f"a{i}", "answer": str(i)} for i in range(6)]
    path = tmp_path / "a"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return prepare_sets({"kind": "jsonl", "name": "a", "options": {"path": str(path)}})


@pytest.fixture
def drawn(store: ObjectStore, inputs: PromptInputs) -> PromptsResult:
    request = PromptsRequest(scope=SCOPE, seed=3, inputs=inputs, cursor=Cursor(), num_groups=4)
    return run(request, store)


def audited(
    store: ObjectStore, inputs: PromptInputs, drawn: PromptsResult, **changes: Any
) -> list[tuple[int, str]]:
    record: StageRecord = drawn.record.model_copy(update=changes.get("record", {}))
    tally = Tally()
    audit_prompts(
        store,
        record_ref(SCOPE, drawn.record, store=store),
        record,
        inputs=inputs,
        cursor=changes.get("cursor", drawn.cursor),
        tally=tally,
    )
    return [(finding.promise, finding.text) for finding in tally.findings]


def test_groups_that_were_drawn_by_the_rule_hold(
    store: ObjectStore, inputs: PromptInputs, drawn: PromptsResult
):
    assert audited(store, inputs, drawn) == []


def test_a_group_that_takes_another_prompt_is_named_by_its_row(
    store: ObjectStore, inputs: PromptInputs, drawn: PromptsResult
):
    rows = read_shard(store, drawn.record.outputs["prompts"], schema=PROMPTS).to_pylist()
    rows[2]["answer"] = "another"
    table = rows_to_table(rows, schema=PROMPTS)
    shard = write_shard(store, table, schema=PROMPTS, key="forged.parquet")
    found = audited(store, inputs, drawn, record={"outputs": {"prompts": shard}})
    assert [promise for promise, _ in found] == [REPLAY]
    assert "forged.parquet: expected row 2: answer" in found[0][1]
    assert "found row 2: answer 'another'" in found[0][1]


def test_a_cursor_that_skips_groups_is_named(
    store: ObjectStore, inputs: PromptInputs, drawn: PromptsResult
):
    ahead = drawn.cursor.model_copy(update={"drawn": 5})
    found = audited(store, inputs, drawn, cursor=ahead)
    assert [promise for promise, _ in found] == [EXACTLY_ONCE]


def test_a_request_that_would_draw_for_ever_is_named_before_anything_is_drawn(
    store: ObjectStore, inputs: PromptInputs, drawn: PromptsResult
):
    body = drawn.record.request
    for forged in ({**body, "num_groups": 2**70}, {**body, "round": 2**70}):
        found = audited(store, inputs, drawn, record={"request": forged})
        assert [promise for promise, _ in found] == [EXACTLY_ONCE]
        assert str(2**70) in found[0][1]
