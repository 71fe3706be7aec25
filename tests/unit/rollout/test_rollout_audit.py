"""A samples shard held against its request: each thing that could be off, and how it is said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.audit_findings import EXACTLY_ONCE, STALENESS, TOKENS, Tally
from storage.experience import read_shard, rows_to_table, write_shard
from storage.object_store import ObjectStore
from storage.records import StageRecord
from storage.schemas import SAMPLES
from tasks.rollout import stage
from tasks.rollout.audit import audit_samples
from tasks.rollout.contract import RolloutRequest
from tasks.workspace import Workspace
from tests.unit.rollout.seeded_engine import SeededEngine
from tests.unit.rollout.small_shard import CONFIG, request_in

Rows = list[dict[str, Any]]
Audit = Callable[..., tuple[Tally, list[str]]]
VOCABULARY = 32


@pytest.fixture
def audit(store: ObjectStore, workspace: Workspace, tmp_path: Path) -> Audit:
    """Samples six prompts, lets the test change the rows, and audits what is stored then."""
    request = request_in(store, tmp_path)
    record = stage.run(request, store, SeededEngine(CONFIG), workspace=workspace).record
    rows = read_shard(store, record.outputs["samples"], schema=SAMPLES).to_pylist()

    def call(
        change: Callable[[Rows], object] = lambda rows: None, **changes: Any
    ) -> tuple[Tally, list[str]]:
        changed = [dict(row) for row in rows]
        replaced = change(changed)
        table = rows_to_table(replaced if isinstance(replaced, list) else changed, schema=SAMPLES)
        shard = write_shard(store, table, schema=SAMPLES, key="shard")
        made = record.model_copy(update={"outputs": {"samples": shard}, **changes})
        return audited(store, request, made)

    return call


def audited(
    store: ObjectStore, request: RolloutRequest, record: StageRecord
) -> tuple[Tally, list[str]]:
    tally = Tally()
    audit_samples(store, request, record, vocabulary=VOCABULARY, tally=tally)
    return tally, [f"{finding.promise} {finding.text}" for finding in tally.findings]


def test_what_the_stage_stores_holds(audit: Audit):
    tally, said = audit()
    assert said == []
    # Six prompts of two completions each; one prompt leaves no room.
    assert tally.counts["samples"] == 10
    assert (tally.counts["groups"], tally.counts["groups without room"]) == (6, 1)
    assert tally.maxima["staleness"] == 0


def test_a_group_that_is_missing_is_named(audit: Audit):
    _, said = audit(lambda rows: rows[:2] + rows[4:])
    assert said == [f"{EXACTLY_ONCE} shard: expected sample 2 of 10 g1-0; found g3-0"]


def test_a_completion_that_stands_twice_is_named(audit: Audit):
    _, said = audit(lambda rows: [*rows[:2], rows[1], *rows[2:]])
    assert said == [f"{EXACTLY_ONCE} shard: expected sample 2 of 10 g1-0; found g0-1"]


def test_a_group_without_room_must_be_noted(audit: Audit):
    _, said = audit(notes=[])
    assert "groups without room" in said[0]
    assert "p2" in said[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("top_k", 7),
        ("seed", 1),
        ("max_tokens", 99),
        ("prompt_token_ids", [1, 2, 3]),
    ],
)
def test_a_sampling_field_that_was_not_asked_for_is_named(audit: Audit, field: str, value: object):
    _, said = audit(lambda rows: rows[3].update({field: value}))
    assert any(line.startswith(f"{TOKENS} ") and f"row 3: {field} {value}" in line for line in said)


def test_a_sample_of_an_older_policy_is_named_and_counted(audit: Audit):
    span = {"start": 0, "policy_version": 3, "policy_digest": "older"}
    tally, said = audit(lambda rows: rows[0].update(version_spans=[span]))
    assert [line[0] for line in said] == [str(STALENESS)]
    # The policy is version 5.
    assert tally.maxima["staleness"] == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"completion_mask": [True]}, "one mask and one logprob per token"),
        ({"rollout_logprobs": [None] * 3}, "a logprob of at most 0 where the mask is true"),
        ({"rollout_logprobs": [0.5] * 3}, "a logprob of at most 0"),
        ({"completion_mask": [True, False, True]}, "else null"),
        ({"completion_token_ids": [2, 1, 1]}, "nothing after a stop token"),
        ({"completion_token_ids": [2, 3, 4]}, "the stop token stored last"),
        ({"completion_token_ids": [2, 3, 32]}, "completion_token_ids from 0 to 31"),
        ({"completion_token_ids": [2, -1, 1]}, "completion_token_ids from 0 to 31"),
        ({"finish_reason": "length"}, "tokens and no stop"),
        ({"finish_reason": "abort"}, "finish_reason stop or length"),
    ],
)
def test_tokens_that_cannot_be_what_was_sampled_are_named(
    audit: Audit, change: dict[str, Any], words: str
):
    sound = {
        "completion_token_ids": [2, 3, 1],
        "completion_mask": [True] * 3,
        "rollout_logprobs": [-1.0] * 3,
        "finish_reason": "stop",
        "stop_token_id": 1,
    }
    assert audit(lambda rows: rows[1].update(sound))[1] == []
    _, said = audit(lambda rows: rows[1].update({**sound, **change}))
    assert any(words in line for line in said)
