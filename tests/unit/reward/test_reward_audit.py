"""A shard graded again: what a grader fix, a timeout and a forged row look like to an auditor."""

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from storage.audit_findings import NO_SILENT_ZERO, REPLAY, Tally
from storage.backends.memory import MemoryStore
from storage.experience import read_shard, rows_to_table, write_shard
from storage.inputs import put_input
from storage.layout import StepScope
from storage.records import StageRecord
from storage.schemas import PROMPTS, REWARDS, SAMPLES
from tasks.reward.audit import Regraded, audit_rewards, needs_trust, regrade, say_regraded
from tasks.reward.contract import RewardConfig, RewardPart, RewardRequest
from tasks.reward.grading import Grading
from tasks.reward.stage import run
from tasks.workspace import Workspace
from tests.unit.reward.conftest import MISBEHAVING
from tests.unit.reward.tokenizers_for_tests import END, write_tokenizer

ASKING = "grader_fixtures.asking"
Rows = list[dict[str, Any]]


class Graded:
    """Three completions of one prompt, graded; the last one spins until its time is up."""

    def __init__(self, directory: Path) -> None:
        self.store = MemoryStore(uuid.uuid4().hex)
        self.workspace = Workspace(cache=directory / "cache", scratch=directory)
        tokenizer = write_tokenizer(directory / "model", special_tags=True)
        texts = [f"fine{END}", f"raise{END}", f"spin{END}"]
        samples = [_sample(index, tokenizer.encode(text).ids) for index, text in enumerate(texts)]
        self.request = RewardRequest(
            scope=StepScope(run="r", step=1),
            shard=0,
            samples=self.write(samples, SAMPLES, "samples"),
            prompts=self.write([_prompt()], PROMPTS, "prompts"),
            model=put_input(
                self.store, {path.name: path for path in (directory / "model").iterdir()}
            ),
            config=RewardConfig(
                parts=[RewardPart(kind=MISBEHAVING, name="bad")],
                cpu_limit_s=1.0,
                max_failed_share=1.0,
            ),
        )
        self.grading = Grading(self.request.config, workspace=self.workspace)
        result = run(self.request, self.store, self.grading, workspace=self.workspace)
        self.record: StageRecord = result.record

    def write(self, rows: Sequence[dict[str, Any]], schema: Any, key: str) -> Any:
        return write_shard(self.store, rows_to_table(rows, schema=schema), schema=schema, key=key)

    def rows(self) -> Rows:
        return read_shard(self.store, self.record.outputs["rewards"], schema=REWARDS).to_pylist()

    def with_rows(self, rows: Rows, **changes: Any) -> StageRecord:
        outputs = {"rewards": self.write(rows, REWARDS, "forged")}
        return self.record.model_copy(update={"outputs": outputs, **changes})

    def again(self, record: StageRecord, *, as_recorded: bool = True) -> Regraded:
        return regrade(
            self.request,
            record,
            self.store,
            self.grading,
            cache=self.workspace.cache,
            as_recorded=as_recorded,
        )


def _prompt() -> dict[str, Any]:
    return {
        "prompt_id": "p",
        "group_id": "g",
        "domain": "test",
        "prompt_token_ids": [1],
        "answer": "7",
    }


def _sample(index: int, token_ids: list[int]) -> dict[str, Any]:
    return {
        "sample_id": f"g-{index}",
        "group_id": "g",
        "sample_index": index,
        "prompt_token_ids": [1],
        "completion_token_ids": token_ids,
        "completion_mask": [True] * len(token_ids),
        "rollout_logprobs": [-0.5] * len(token_ids),
        "finish_reason": "stop",
        "stop_token_id": token_ids[-1],
        "seed": index,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 100,
        "version_spans": [],
    }


@pytest.fixture
def graded(importable_fixtures: None, tmp_path: Path) -> Iterator[Graded]:
    opened = Graded(tmp_path)
    yield opened
    opened.grading.close()


def test_a_shard_graded_again_is_the_same_but_for_what_a_clock_decided(graded: Graded):
    found = graded.again(graded.record)
    assert (found.num_samples, found.others, found.environment_changes) == (3, [], [])
    assert found.left_out == ["g-2: not replayable, as its record says"]
    tally = Tally()
    say_regraded(found, graded.record.outputs["rewards"], tally=tally)
    assert tally.findings == []
    assert tally.counts["rewards graded again"] == 2


def test_a_sample_that_is_graded_otherwise_today_is_listed(graded: Graded):
    rows = graded.rows()
    rows[0] |= {"reward": 0.25}
    record = graded.with_rows(rows, environment={**graded.record.environment, "code": "older"})
    found = graded.again(record)
    (other,) = found.others
    assert (other.sample_id, other.was, other.now) == ("g-0", 0.25, 1.0)
    tally = Tally()
    say_regraded(found, record.outputs["rewards"], tally=tally)
    (finding,) = tally.findings
    assert (finding.promise, finding.key) == (REPLAY, "forged")
    assert "0.25 (graded); 1 of 3 samples differ; the grader is another: code: older" in (
        finding.found
    )


def test_what_a_service_says_otherwise_is_listed_where_another_way_to_grade_is_tried(
    graded: Graded,
):
    away = {"url": "http://127.0.0.1:9", "model": "m", "patience_s": 0}
    asked = RewardPart(kind=ASKING, name="asked", domains=["elsewhere"], options=away)
    parts = [RewardPart(kind=MISBEHAVING, name="bad", weight=2.0), asked]
    config = graded.request.config.model_copy(update={"parts": parts})
    graded.request = graded.request.model_copy(update={"config": config})
    assert graded.again(graded.record).others == []
    tried = graded.again(graded.record, as_recorded=False)
    changed = [(other.was, other.now) for other in tried.others if other.is_other_verdict]
    assert changed == [(1.0, 2.0)]


def test_a_sample_that_ran_into_a_limit_then_or_now_is_left_out(graded: Graded):
    rows = graded.rows()
    rows[2] |= {"reward": 1.0, "status": "graded", "parts": []}
    now = graded.again(graded.with_rows(rows, notes=[]))
    assert now.others == []
    assert now.left_out == ["g-2: ran into a limit now"]


def test_a_failure_that_is_stored_as_a_number_breaks_the_promise(graded: Graded):
    def said(change: dict[str, Any], index: int = 1) -> list[str]:
        rows = graded.rows()
        rows[index] |= change
        record = graded.with_rows(rows)
        table = read_shard(graded.store, record.outputs["rewards"], schema=REWARDS)
        tally = Tally()
        audit_rewards(table, ["g-0", "g-1", "g-2"], key="key", tally=tally)
        assert {finding.promise for finding in tally.findings} <= {NO_SILENT_ZERO}
        return [finding.found for finding in tally.findings]

    assert said({}) == []
    assert said({"reward": 0.0}) == [f"0.0 as 'grader_error' ({graded.rows()[1]['reason']})"]
    assert said({"status": "graded"})[0].startswith("None as 'graded'")
    assert said({"reason": None}) == ["None as 'grader_error' (None)"]
    assert said({"status": "lost"})[0].startswith("None as 'lost'")
    assert said({"sample_id": "g-9"})[0] == repr(["g-0", "g-9", "g-2"])


def test_limits_that_no_worker_can_be_given_are_refused_before_any_dies(graded: Graded):
    config = graded.request.config.model_copy(update={"cpu_limit_s": 1e300})
    graded.request = graded.request.model_copy(update={"config": config})
    with pytest.raises(ValueError, match="Expected at most 86400 s"):
        graded.again(graded.record)


@pytest.mark.parametrize(
    ("part", "sandbox", "danger"),
    [
        ({"kind": "python", "options": {"function": "no.such:thing"}}, {}, "run no.such:thing"),
        ({"kind": "no.such.module"}, {}, "run no.such.module"),
        (
            {"kind": "judge", "options": {"url": "http://there", "rubric": "r"}},
            {},
            "ask http://there",
        ),
        ({"kind": "code"}, {"allow_unsandboxed": True}, "unsandboxed"),
        ({"kind": "code"}, {"backend": "http", "url": "http://there"}, "by http://there"),
    ],
)
def test_a_strangers_config_is_read_but_never_obeyed(
    part: dict[str, Any], sandbox: dict[str, Any], danger: str
) -> None:
    config = RewardConfig.model_validate({"parts": [part], "sandbox": sandbox})
    assert danger in (needs_trust(config) or "")


@pytest.mark.parametrize("kind", ["math", "code", "exact"])
def test_our_own_graders_need_no_trust(kind: str) -> None:
    assert needs_trust(RewardConfig(parts=[RewardPart(kind=kind)])) is None
