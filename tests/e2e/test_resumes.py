"""What a resume does with a changed config, a step that fails each time, a stop, and forks."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.ledger import read_commit, read_plan, read_record
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import Plan, StageRecord, StepCommit
from storage.store_config import StoreConfig
from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

QUICK = ("--set", "evaluate.suites.held_out.max_prompts=8", "--set", "prompts.groups_per_step=16")
Wait = Callable[[Callable[[], bool], float], None]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def store(directory: Path, base: None) -> ObjectStore:
    return open_store(StoreConfig(uri=str(directory)), writing=False)


@pytest.fixture(scope="module")
def base(cli: Cli, directory: Path) -> None:
    """Four steps that the tests go on from, each under a fork of its own."""
    cli.ok("launch", "addition", "--run", "base", "--steps", "4", *QUICK, *at(directory))


def at(directory: Path) -> tuple[str, str]:
    return ("--store", str(directory))


def last_line(done) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def commit_of(store: ObjectStore, run: str, step: int) -> StepCommit:
    return read_commit(store, run, step)[0]


def plan_of(store: ObjectStore, run: str, step: int) -> Plan:
    return read_plan(store, commit_of(store, run, step).plan)


def record_of(store: ObjectStore, run: str, step: int, stage: str) -> StageRecord:
    commit = commit_of(store, run, step)
    return read_record(store, next(ref for ref in commit.records if ref.stage == stage))


def test_a_fork_with_no_change_makes_its_parents_next_steps_to_the_bit(
    cli: Cli, directory: Path, store: ObjectStore
):
    cli.ok("fork", "base@2", "--run", "same", "--steps", "2", *at(directory))
    summary = json.loads(cli.ok("show", "same", "--json", *at(directory)))
    assert summary["parent"] == "base@2"
    assert [step["step"] for step in summary["steps"]] == [2, 3, 4]
    for step in (2, 3, 4):
        ours, theirs = commit_of(store, "same", step), commit_of(store, "base", step)
        assert ours.policy_digest == theirs.policy_digest
        assert ours.cursor == theirs.cursor
    for stage, output in (("rollout-0000", "samples"), ("train", "train")):
        ours, theirs = (record_of(store, run, 3, stage) for run in ("same", "base"))
        assert ours.outputs[output].sha256 == theirs.outputs[output].sha256
    ours, theirs = (record_of(store, run, 4, "train") for run in ("same", "base"))
    assert ours.state_digest == theirs.state_digest
    # Nothing was copied: the fork's policy is its parent's object.
    assert commit_of(store, "same", 2).policy.files[0].key.startswith("runs/base/")


def test_a_fork_with_another_config_differs_from_there_and_its_tree_is_drawn(
    cli: Cli, directory: Path, store: ObjectStore
):
    rate = ("--set", "train.learning_rate=1e-5")
    cli.ok("fork", "same@3", "--run", "other", *rate, "--steps", "1", *at(directory))
    assert plan_of(store, "other", 4).configs["train"]["learning_rate"] == 1e-5
    assert commit_of(store, "other", 4).policy_digest != commit_of(store, "base", 4).policy_digest
    shown = cli.ok("show", "other", *at(directory))
    tree = [line.strip() for line in shown.splitlines() if "└" in line or "├" in line]
    assert any("same" in line and "base@2" not in line for line in tree)
    assert any("other" in line for line in tree)


def test_another_config_holds_from_the_next_step_and_other_data_need_a_fork(
    cli: Cli, directory: Path, store: ObjectStore
):
    cli.ok("fork", "base@4", "--run", "tuned", *at(directory))
    refused = cli("resume", "tuned", "--steps", "1", "--set", "seed=5", *at(directory))
    assert "rollbook fork tuned@4" in last_line(refused)
    assert not cli.engines()
    rate = ("--set", "train.learning_rate=1e-5")
    cli.ok("resume", "tuned", "--steps", "1", *rate, *at(directory))
    assert plan_of(store, "tuned", 5).configs["train"]["learning_rate"] == 1e-5
    cli.ok("resume", "tuned", "--steps", "1", *at(directory))
    assert record_of(store, "tuned", 6, "train").request["config"]["learning_rate"] == 1e-5
    assert record_of(store, "tuned", 6, "train").request["update_index"] == 5


def test_a_step_that_fails_each_time_is_redone_with_another_config_or_skipped(
    cli: Cli, directory: Path, store: ObjectStore
):
    cli.ok("fork", "base@4", "--run", "stuck", *at(directory))
    # No engine reproduces logprobs that closely, so the step fails however often it is tried.
    hopeless = ("--set", "rollout.probe_tolerance=1e-9")
    resume = ("resume", "stuck", "--steps", "1", *at(directory))
    for arguments in ((*resume, *hopeless), resume):
        assert "Expected at most 1e-09" in last_line(cli(*arguments))
    patient = ("--set", "rollout.probe_tolerance=1e-3")
    cli.ok(*resume, "--redo", *patient, "--reason", "too close")
    redone = plan_of(store, "stuck", 5)
    assert (redone.revision, redone.reason, redone.redo) == (1, "too close", 0)
    assert record_of(store, "stuck", 5, "rollout-0000").request.get("redo") is None
    assert commit_of(store, "stuck", 5).policy_digest != commit_of(store, "base", 4).policy_digest

    assert "Expected at most 1e-09" in last_line(cli(*resume, *hopeless))
    cli.ok(*resume, "--skip-step", *patient, "--reason", "not worth it")
    skipped = commit_of(store, "stuck", 6)
    assert (skipped.kind, skipped.policy_version) == ("skipped", 6)
    assert skipped.policy_digest == commit_of(store, "stuck", 5).policy_digest
    assert skipped.state_id == commit_of(store, "stuck", 5).state_id
    assert skipped.cursor.drawn == commit_of(store, "stuck", 5).cursor.drawn + 16
    cli.ok(*resume)
    assert record_of(store, "stuck", 7, "train").request["update_index"] == 5
    assert commit_of(store, "stuck", 7).policy_digest != skipped.policy_digest


def test_a_lost_object_of_an_open_step_is_made_again_by_a_redo(
    cli: Cli, directory: Path, store: ObjectStore, wait_for: Wait
):
    cli.ok("fork", "base@3", "--run", "lossy", *at(directory))
    stages = directory / "runs/lossy/steps/00000004/stages"
    process = cli.start("resume", "lossy", "--steps", "1", *at(directory))
    wait_for(lambda: any((stages / "rollout-0000").glob("*.json")), 120)
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not cli.engines(), 20)
    (directory / "runs/lossy/steps/00000004/commit.json").unlink(missing_ok=True)
    for shard in (directory / "runs/lossy/steps/00000004/attempts").rglob("rollout-*.parquet"):
        shard.unlink()
    failed = cli("resume", "lossy", "--steps", "1", *at(directory))
    assert "rollout-0000.parquet" in last_line(failed)
    assert "--redo" in failed.stderr
    cli.ok("resume", "lossy", "--steps", "1", "--redo", *at(directory))
    assert plan_of(store, "lossy", 4).redo == 1
    assert record_of(store, "lossy", 4, "rollout-0000").request["redo"] == 1
    assert commit_of(store, "lossy", 4).policy_digest == commit_of(store, "base", 4).policy_digest


def test_a_stop_stores_the_trainers_state_and_the_next_commit_names_it(
    cli: Cli, directory: Path, store: ObjectStore, wait_for: Wait
):
    cli.ok("fork", "base@2", "--run", "paused", *at(directory))
    process = cli.start("resume", "paused", "--steps", "20", *at(directory))
    wait_for((directory / "runs/paused/steps/00000005/plan-0000.json").exists, 120)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert "saving the trainer's state" in output
    wait_for(lambda: not cli.engines(), 20)
    # Interrupted in mid-update there is no state to save; at its own end a resume always saves.
    cli.ok("resume", "paused", "--steps", "1", *at(directory))
    cli.ok("resume", "paused", "--steps", "1", *at(directory))
    head = json.loads(cli.ok("show", "paused", "--json", *at(directory)))["head_step"]
    assert record_of(store, "paused", head, "train").notes == []
    assert any(ref.stage == "snapshot" for ref in commit_of(store, "paused", head).records)
    assert commit_of(store, "paused", 4).policy_digest == commit_of(store, "base", 4).policy_digest


def test_another_machine_goes_on_by_rebase_alone_and_the_commit_records_it(
    cli: Cli, directory: Path, store: ObjectStore
):
    cli.ok("fork", "base@3", "--run", "moved", *at(directory))
    elsewhere = Cli(
        home=cli.home,
        store=cli.store,
        environment={**cli.environment, "ATEN_CPU_CAPABILITY": "default"},
    )
    resume = ("resume", "moved", "--steps", "1", *at(directory))
    assert "--rebase" in last_line(elsewhere(*resume))
    done = elsewhere(*resume, "--rebase")
    assert done.returncode == 0, done.stderr
    assert "rebased: replaying steps" in done.stderr
    rebased = commit_of(store, "moved", 4).rebased
    assert rebased is not None
    assert rebased.share < 0.1
    assert record_of(store, "moved", 4, "train").snapshot is not None
