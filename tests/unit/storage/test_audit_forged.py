"""Steps that somebody made up and sealed again: all digests fit, and what does not follow is named.

The last step of a run is forged, one field of one record at a time.
"""

import json
import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from storage.audit import ChainRequest, audit_chain
from storage.audit_findings import (
    CHAIN,
    EXACTLY_ONCE,
    STALENESS,
    WEIGHT_PROOF,
    Finding,
)
from storage.backends.memory import MemoryStore
from storage.layout import EvalScope, commit_key, eval_key
from storage.records import InputRef, PromptSet, canonical_json, request_digest, sha256_hex
from tests.contract.complete_run import next_step, write_run, write_stop

RUN, LAST = "made", 3
Json = dict[str, Any]
Edit = Callable[[Json], object]


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore(uuid.uuid4().hex)
    write_run(made, LAST, evals=(2,))
    return made


def findings(store: MemoryStore) -> list[Finding]:
    request = ChainRequest()
    return audit_chain(store, RUN, request, progress=lambda done, total: None).tally.findings


def read(store: MemoryStore, key: str) -> Json:
    return json.loads(store.get(key))


def set_at(*path: str | int, value: object) -> Edit:
    """Returns an edit that puts `value` at `path`."""

    def edit(found: Json) -> None:
        inner: Any = found
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value

    return edit


def forge_record(store: MemoryStore, stage: str, edit: Edit) -> str:
    """Edits a record of the last step and seals it again; returns its key."""
    key = commit_key(RUN, LAST)
    commit = read(store, key)
    ref = next(ref for ref in commit["records"] if ref["stage"] == stage)
    ref.update(_forged(store, ref["key"], edit))
    if stage == "train":
        made = read(store, ref["key"])
        commit |= {"state_id": ref["sha256"], "policy": made["policy"]}
        commit["policy_digest"] = made["policy"]["digest"]
    if stage == "prompts":
        forge_plan(store, set_at("prompts", value=ref), commit)
    store.put(key, canonical_json(commit))
    return ref["key"]


def _forged(store: MemoryStore, key: str, edit: Edit) -> Json:
    """Puts an edited record under the key of its new request; returns its reference."""
    record = read(store, key)
    edit(record)
    digest = request_digest(re.sub(r"-\d{4,}$", "", record["stage"]), record["request"])
    record["request_digest"] = digest
    forged = f"{key.rpartition('/')[0]}/{digest}.json"
    store.put(forged, canonical_json(record))
    return {"key": forged, "sha256": sha256_hex(canonical_json(record)), "request_digest": digest}


def forge_plan(store: MemoryStore, edit: Edit, commit: Json | None = None) -> str:
    """Edits the plan of the last step and seals it again, in `commit` if it is edited already."""
    found = commit or read(store, commit_key(RUN, LAST))
    ref = found["plan"]
    plan = read(store, ref["key"])
    edit(plan)
    payload = canonical_json(plan)
    store.put(ref["key"], payload)
    ref.update(sha256=sha256_hex(payload), num_bytes=len(payload))
    if commit is None:
        store.put(commit_key(RUN, LAST), canonical_json(found))
    return ref["key"]


OTHER_URL = [{"kind": "judge", "options": {"url": "http://other"}}]
ELSEWHERE = "runs/made/steps/00000002/attempts/attempt/train.parquet"


@pytest.mark.parametrize(
    ("stage", "edit", "promise", "words"),
    [
        ("prompts", set_at("request", "cursor", "drawn", value=0), EXACTLY_ONCE, "cursor"),
        ("prompts", set_at("request", "mixture", value="other"), CHAIN, "mixture"),
        ("prompts", set_at("request", "train", value="other"), CHAIN, "train"),
        ("prompts", set_at("request", "seed", value="8"), CHAIN, "seed 7"),
        ("prompts", set_at("request", "redo", value=1), CHAIN, "redo"),
        ("prompts", set_at("outputs", "prompts", "rows", value=5), EXACTLY_ONCE, "groups 4"),
        ("rollout-0001", set_at("request", "rows", value=[0, 2]), CHAIN, "rows [2, 4]"),
        ("rollout-0001", set_at("request", "seed", value="12"), CHAIN, "seed 11"),
        ("rollout-0001", set_at("request", "policy", value="other"), CHAIN, "policy"),
        ("rollout-0001", set_at("request", "model", value="other"), CHAIN, "model"),
        ("rollout-0001", set_at("request", "prompts", value="other"), CHAIN, "prompts"),
        ("rollout-0001", set_at("request", "sampling", "top_k", value=5), CHAIN, "sampling"),
        ("rollout-0001", set_at("request", "config", "dtype", value="bf16"), CHAIN, "config.dtype"),
        ("rollout-0001", set_at("proof", value=None), WEIGHT_PROOF, "a weight proof"),
        ("rollout-0001", set_at("proof", "policy_version", value=1), WEIGHT_PROOF, "proven policy"),
        ("rollout-0001", set_at("proof", "policy_digest", value="x"), WEIGHT_PROOF, "proven"),
        ("rollout-0001", set_at("proof", "max_abs_diff", value=0.1), WEIGHT_PROOF, "at most 0.001"),
        ("reward-0001", set_at("request", "samples", value="other"), CHAIN, "samples"),
        ("reward-0001", set_at("request", "prompts", value="other"), CHAIN, "prompts"),
        ("reward-0001", set_at("request", "model", value="other"), CHAIN, "model"),
        ("reward-0001", set_at("request", "config", "cpu_limit_s", value=9), CHAIN, "cpu_limit_s"),
        (
            "reward-0001",
            set_at("request", "config", "parts", value=OTHER_URL),
            CHAIN,
            "http://judge",
        ),
        ("reward-0001", set_at("request", "config", "parts", value=[]), CHAIN, "config.parts"),
        ("train", set_at("request", "samples", value=[]), CHAIN, "samples"),
        ("train", set_at("request", "rewards", 0, value="other"), CHAIN, "rewards"),
        ("train", set_at("request", "policy", value="other"), CHAIN, "policy"),
        ("train", set_at("request", "state_id", value="other"), CHAIN, "state_id"),
        ("train", set_at("request", "temperature", value=0.5), CHAIN, "temperature 1.0"),
        ("train", set_at("request", "config", "learning_rate", value=1), CHAIN, "learning_rate"),
        ("train", set_at("policy", "digest", value="0" * 64), CHAIN, "policy digest of the files"),
        ("train", set_at("outputs", "train", "key", value=ELSEWHERE), CHAIN, "an object of train"),
    ],
)
def test_a_record_that_does_not_follow_is_named(
    store: MemoryStore, stage: str, edit: Edit, promise: int, words: str
):
    key = forge_record(store, stage, edit)
    found = findings(store)
    where = (key, commit_key(RUN, LAST))
    assert any(
        finding.promise == promise and finding.key in where and words in finding.expected
        for finding in found
    ), [finding.text for finding in found]


@pytest.mark.parametrize(
    ("edit", "promise", "words"),
    [
        (set_at("shards", 1, "start", value=1), EXACTLY_ONCE, "shard, start"),
        (set_at("shards", 1, "stop", value=5), EXACTLY_ONCE, "rows in shards"),
        (set_at("shards", 1, "policy_version", value=1), STALENESS, "policy of shard 1"),
        (set_at("shards", 1, "policy_digest", value="old"), STALENESS, "policy of shard 1"),
        (set_at("cursor", "drawn", value=99), EXACTLY_ONCE, "cursor"),
        (set_at("kind", value="skipped"), CHAIN, "kind"),
        (set_at("previous", value="other"), CHAIN, "previous"),
        (set_at("revision", value=1), CHAIN, "key of the plan"),
        (set_at("run", value="other"), CHAIN, "run made"),
    ],
)
def test_a_plan_that_does_not_follow_is_named(
    store: MemoryStore, edit: Edit, promise: int, words: str
):
    key = forge_plan(store, edit)
    found = findings(store)
    where = (key, commit_key(RUN, LAST))
    assert any(
        finding.promise == promise and finding.key in where and words in finding.expected
        for finding in found
    ), [finding.text for finding in found]


def test_a_record_in_another_encoding_is_found_though_its_digest_fits(store: MemoryStore):
    commit = read(store, commit_key(RUN, LAST))
    ref = commit["records"][-1]
    payload = store.get(ref["key"]) + b"\n"
    store.put(ref["key"], payload)
    ref["sha256"] = commit["state_id"] = sha256_hex(payload)
    store.put(commit_key(RUN, LAST), canonical_json(commit))
    assert [(finding.key, finding.expected) for finding in findings(store)] == [
        (ref["key"], "canonical JSON")
    ]


def test_a_snapshot_of_another_state_is_no_snapshot_of_the_stop():
    store = MemoryStore(uuid.uuid4().hex)
    head = write_run(store, LAST - 1)
    stopped = write_stop(store, head)
    next_step(store, head, stopped=stopped)
    assert findings(store) == []
    forge_record(store, "snapshot", set_at("request", "state_id", value="other"))
    assert any("state_id" in finding.expected for finding in findings(store))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": InputRef(digest="0" * 64, files={})}, "digest of the model's files"),
        (
            {"prompts": [PromptSet(name="s", weight=1, train_rows=7, held_out_rows=8, dropped={})]},
            "rows of train.parquet 7",
        ),
    ],
)
def test_inputs_that_are_not_what_run_json_says_are_named(fields: Json, words: str):
    store = MemoryStore(uuid.uuid4().hex)
    if "prompts" in fields:
        honest = write_run(MemoryStore("honest"), 0).run.prompts
        fields = {"prompts": honest.model_copy(update={"sets": fields["prompts"]})}
    write_run(store, 1, **fields)
    assert any(words in finding.expected for finding in findings(store))


@pytest.mark.parametrize(
    ("stage", "edit", "words"),
    [
        ("rollout-0000", set_at("request", "policy", value="other"), "policy"),
        ("rollout-0000", set_at("request", "prompts", value="other"), "prompts"),
        ("rollout-0000", set_at("proof", "policy_version", value=1), "proven policy"),
        ("reward-0000", set_at("request", "samples", value="other"), "samples"),
        ("reward-0000", set_at("request", "model", value="other"), "model"),
    ],
)
def test_an_evaluation_that_does_not_follow_is_named(
    store: MemoryStore, stage: str, edit: Edit, words: str
):
    key = eval_key(EvalScope(run=RUN, version=2, suite="held_out"))
    record = read(store, key)
    ref = next(ref for ref in record["records"] if ref["stage"] == stage)
    ref.update(_forged(store, ref["key"], edit))
    store.put(key, canonical_json(record))
    assert any(
        finding.key == ref["key"] and words in finding.expected for finding in findings(store)
    )
