"""What `rollbook verify` says of whole runs, and what it refuses to be asked."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.verification import VerifyOptions, parse_steps, pick_steps, verify_run
from flows.verify_page import report_markdown
from flows.verify_replay import Replayed
from flows.verify_report import Report
from flows.verify_shards import NOT_CHECKED, Shard, asked_as_then
from flows.verify_verdicts import promise_reports, replay_findings
from storage.audit import ChainAudit, ChainRequest, audit_chain
from storage.audit_findings import REPLAY, Tally
from storage.backends.local import LocalStore
from storage.layout import StepScope, commit_key
from storage.ledger import read_record
from storage.signing import load_signer, new_key, public_path
from tasks.reward.contract import RewardConfig
from tasks.workspace import Workspace
from tests.contract.complete_run import Head, next_step, write_fork, write_run
from tests.unit.flows.test_cli import Command, rollbook

__all__ = ["rollbook"]

RUN = "made"
Verify = Callable[..., Report]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def head(store: LocalStore) -> Head:
    return write_run(store, 3)


@pytest.fixture
def verify(store: LocalStore, tmp_path: Path) -> Verify:
    def call(run: str = RUN, **options: object) -> Report:
        return verify_run(
            store,
            run,
            VerifyOptions(**options),  # type: ignore[arg-type]
            workspace=Workspace(cache=tmp_path / "cache", scratch=tmp_path),
            progress=lambda what, done, total: None,
        )

    return call


@pytest.mark.parametrize(
    ("text", "bounds"),
    [(None, (None, None)), ("3", (3, 3)), ("3..", (3, None)), ("..7", (None, 7)), ("3..7", (3, 7))],
)
def test_steps_are_named_as_a_range(text: str | None, bounds: tuple[int | None, int | None]):
    assert parse_steps(text) == bounds


@pytest.mark.parametrize("text", ["", "..", "a..b", "3-7", "-1"])
def test_steps_that_are_no_range_are_refused(text: str):
    with pytest.raises(ValueError, match=r"Expected A\.\.B"):
        parse_steps(text)


@pytest.mark.parametrize(
    ("options", "words"), [({"sample": 0.0}, "--sample"), ({"head": "abc"}, "64 hex digits")]
)
def test_options_that_make_no_sense_are_refused(
    verify: Verify, head: Head, options: dict[str, object], words: str
):
    with pytest.raises(ValueError, match=words):
        verify(**options)


def test_a_run_that_holds_says_what_nobody_has_proven(verify: Verify, head: Head):
    report = verify()
    assert (report.holds, report.cause, report.num_broken) == (True, None, 0)
    assert (report.first_step, report.last_step, report.head_digest) == (0, 3, head.digest)
    assert (report.tail, report.signatures) == (
        "tail unproven",
        "self-asserted: no commit is signed",
    )
    assert [promise.verdict for promise in report.promises] == [
        "not checked",
        "held to the bit",
        "not checked",
        "held within tolerance",
        *["not checked"] * 4,
    ]
    proof = report.promises[3]
    assert (proof.figure, proof.tolerance) == (1e-5, 1e-3)


def test_what_an_auditor_knows_is_said_to_be_proven(
    store: LocalStore, verify: Verify, tmp_path: Path
):
    key = tmp_path / "key"
    new_key(key)
    signed = write_run(store, 2, signer=load_signer(key))
    report = verify(head=signed.digest, key_file=public_path(key))
    assert report.tail == "tail proven by the digest given"
    assert report.signatures.startswith("3 commits signed by the key given")
    next_step(store, signed, signer=load_signer(key))
    later = verify(head=signed.digest)
    assert later.tail == "tail proven up to step 2, unproven after it"
    assert later.signatures == "self-asserted: 4 commits signed by keys that they name themselves"


def test_a_broken_run_names_promise_key_expected_and_found(
    store: LocalStore, verify: Verify, head: Head
):
    key = commit_key(RUN, 2)
    store.put(key, store.get(key).replace(b'"reward_mean":0.5', b'"reward_mean":0.6'))
    report = verify()
    chain = report.promises[1]
    assert (report.holds, chain.verdict, chain.num_broken) == (False, "broken", 1)
    assert chain.broken[0].key == key
    assert report.cause is not None
    assert report.cause.startswith(f"promise 2 (chain) is broken: {key}: expected digest ")


def test_without_run_json_nothing_else_is_claimed(store: LocalStore, verify: Verify, head: Head):
    store.delete("runs/made/run.json")
    report = verify()
    assert report.cause == (
        "promise 2 (chain) is broken: runs/made/run.json: expected an object; found no object"
    )
    assert report.last_step is None


def chain_of(store: LocalStore, run: str = RUN) -> ChainAudit:
    return audit_chain(store, run, ChainRequest(), progress=lambda done, total: None)


def test_which_steps_are_picked_follows_from_digests_and_seed_alone(store: LocalStore):
    write_run(store, 40)
    chain = chain_of(store)
    some = pick_steps(store, chain, VerifyOptions(sample=0.25))
    assert some == pick_steps(store, chain, VerifyOptions(sample=0.25))
    assert 3 < len(some) < 20
    assert some != pick_steps(store, chain, VerifyOptions(sample=0.25, seed="mine"))
    assert set(pick_steps(store, chain, VerifyOptions(sample=0.1))) <= set(some)
    assert len(pick_steps(store, chain, VerifyOptions(sample=1e-9))) == 1
    assert pick_steps(store, chain, VerifyOptions(first=3, last=5)) == [(RUN, n) for n in (3, 4, 5)]


def test_a_forks_steps_are_picked_from_its_parents_too(store: LocalStore, head: Head):
    write_fork(store, head, run="fork", steps=2)
    picked = pick_steps(store, chain_of(store, "fork"), VerifyOptions())
    assert picked == [*((RUN, n) for n in range(4)), ("fork", 3), ("fork", 4), ("fork", 5)]


def replayed(*outcomes: str) -> list[tuple[int, Replayed]]:
    return [
        (step, Replayed("train", f"key {step}", outcome, "why", 0.01 * step))  # type: ignore[arg-type]
        for step, outcome in enumerate(outcomes, start=1)
    ]


@pytest.mark.parametrize(
    ("outcomes", "verdict", "figure"),
    [
        (["to the bit", "to the bit"], "held to the bit", None),
        (["to the bit", "within tolerance"], "held within tolerance", 0.02),
        (["to the bit", "not comparable"], "held to the bit", None),
        (["not comparable", "not checked"], "not checked", None),
        (["to the bit", "differs"], "broken", None),
    ],
)
def test_the_verdict_on_replay_is_that_of_its_worst_stage(
    store: LocalStore, head: Head, outcomes: list[str], verdict: str, figure: float | None
):
    chain, facts, stages = chain_of(store), Tally(), replayed(*outcomes)
    replay_findings(stages, facts)
    found = promise_reports(chain, facts, Tally(), stages)[REPLAY - 1]
    assert (found.verdict, found.figure) == (verdict, figure)
    if verdict == "broken":
        assert found.broken[0].key == "key 2"


def test_what_was_not_compared_is_counted_by_its_reason(store: LocalStore, head: Head):
    stages = replayed("to the bit", "not comparable", "not checked", "not checked")
    found = promise_reports(chain_of(store), Tally(), Tally(), stages)[REPLAY - 1]
    assert "; 1 stage not comparable (why); 2 stages not checked (why)" in found.detail


def test_steps_that_this_code_cannot_read_are_no_break_and_are_said(store: LocalStore, head: Head):
    facts = Tally()
    facts.counts.update({"prompts drawn again": 4, NOT_CHECKED: 2})
    found = promise_reports(chain_of(store), facts, Tally(), None)
    assert found[0].verdict == "held to the bit"
    assert found[0].detail.endswith("; 2 steps not checked, see below")


def test_how_many_processes_grade_is_no_strangers_choice(store: LocalStore, head: Head):
    record = next(
        read_record(store, ref) for ref in head.commit.records if ref.stage == "reward-0000"
    )
    asked = {"parts": [{"kind": "code"}], "workers": 10**6, "cpu_limit_s": 9.0}
    asked["sandbox"] = {"allow_unsandboxed": True, "concurrency": 10**6}
    record = record.model_copy(update={"request": {**record.request, "config": asked}})
    prompts = record.outputs["rewards"]
    shard = Shard(StepScope(run=RUN, step=3), head.run, prompts, head.commit.policy, "0000")
    config = shard.reward_request(record, prompts).config
    assert (config.cpu_limit_s, config.sandbox.allow_unsandboxed) == (9.0, True)
    assert (config.workers, config.sandbox.concurrency) == (2, 4)


def test_what_is_imported_for_an_audit_is_light():
    heavy = ("torch", "vllm", "deepspeed", "transformers", "prefect")
    modules = "flows.verification, flows.verify_page"
    code = f"import sys, {modules}; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_prints_a_report_and_ends_in_the_cause(
    store: LocalStore,
    head: Head,
    rollbook: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("ROLLBOOK_HOME", str(tmp_path / "home"))
    where = ["--store", str(tmp_path / "store")]
    out, err = rollbook("verify", RUN, *where)
    assert "everything that was checked holds" in out
    assert head.digest in out
    assert err == ""
    shutil.rmtree(tmp_path / "store" / "runs" / RUN / "steps" / "00000002" / "attempts")
    out, err = rollbook("verify", RUN, *where, "--json")
    report = Report.model_validate(json.loads(out))
    assert report.num_broken > 5
    assert err.strip().splitlines()[-1].startswith("error: promise 2 (chain) is broken: runs/made/")


def test_the_command_refuses_steps_that_are_not_there(
    head: Head, rollbook: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROLLBOOK_HOME", str(tmp_path / "home"))
    _, err = rollbook("verify", RUN, "--steps", "7..9", "--store", str(tmp_path / "store"))
    assert "has steps 0 to 3" in err.strip().splitlines()[-1]


def test_a_reports_page_draws_nothing_that_the_store_says(verify: Verify, head: Head):
    report = verify().model_copy(update={"notes": ["<script> `x` [a](b) | c"]})
    page = report_markdown(report)
    assert "\\<script\\> \\`x\\` \\[a\\](b)" in page
    assert "| 2 | chain | held to the bit |" in page


def test_a_page_says_of_how_many_steps_the_facts_were_computed_again(verify: Verify, head: Head):
    report = verify().model_copy(update={"level": "facts", "facts_of_steps": [2]})
    assert "facts: computed again for 1 step;" in report_markdown(report)
    assert "facts: computed again" not in report_markdown(verify())


def test_a_service_is_asked_again_with_the_token_of_then(head: Head):
    options = {"url": "http://judge", "rubric": "r"}
    part = {"kind": "judge", "name": "kind words", "options": options}
    recorded = RewardConfig.model_validate({"parts": [part, {"kind": "exact"}]})
    stored = {**part, "options": {**options, "api_key_env": "KEY", "rubric": "another"}}
    run = head.run.model_copy(update={"config": {"reward": {"parts": [stored]}}})
    judge, exact = asked_as_then(recorded, run).parts
    assert judge.options == {**options, "api_key_env": "KEY"}
    assert exact == recorded.parts[1]
