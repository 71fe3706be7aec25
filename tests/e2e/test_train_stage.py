"""The train stage over a store: genesis, steps, restoring by replay, and what it refuses."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.home import home as product_home
from storage.errors import NotFound
from storage.experience import read_shard
from storage.layout import StepScope
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.policies import open_policy, policy_digest, read_probe
from storage.records import StageRecord, sha256_hex
from storage.schemas import TRAIN
from storage.store_config import StoreConfig
from tasks.errors import Permanent
from tasks.train.contract import ReplayRequest, SnapshotRequest, TrainConfig
from tests.e2e.train_run import RUN, commit, genesis_request, new_run, train_request
from tests.unit.train.lab import Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIG = TrainConfig(learning_rate=1e-2, probe_rows=2, probe_tokens=16)


@dataclass
class Run:
    """A store with a run, a model, and the means to run the train stage on it."""

    lab: Lab
    model: Path
    scratch: Path
    directory: Path
    store: ObjectStore
    num_engines: int = 0

    def fresh_engine(self) -> None:
        """Ends the trainer, if any, and starts another process."""
        if self.num_engines:
            self.lab("close_engine", "trainer")
        self.num_engines += 1
        self.lab("open_engine", "trainer", CONFIG, self.model, self.scratch)

    def forget_state(self) -> None:
        """Makes the trainer hold another state than any that is asked for."""
        self.lab("engine", "trainer", "adopt", "none of this run")

    def train(self, request):
        return self.lab("run_stage", "trainer", str(self.directory), request)

    def step(self, config: TrainConfig = CONFIG, **how) -> StageRecord:
        request, records = train_request(self.store, config, **how)
        result = self.train(request)
        commit(self.store, result.record, records)
        return result.record

    def copy(self, directory: Path) -> "Run":
        shutil.copytree(self.directory, directory)
        store = open_store(StoreConfig(uri=str(directory)), writing=True)
        return Run(self.lab, self.model, self.scratch, directory, store, self.num_engines)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Genesis (with a snapshot) and two committed steps without."""
    root = tmp_path_factory.mktemp("train")
    lab = Lab(root / "log")
    lab("make_model", root / "model", "qwen2", True)
    made = Run(lab, root / "model", root / "scratch", root / "store", new_run(root / "store"))
    made.fresh_engine()
    result = made.train(genesis_request(made.model, CONFIG))
    commit(made.store, result.record, [])
    made.step()
    made.step()
    yield made
    lab.close()


def test_genesis_publishes_the_base_model_with_probe_and_snapshot(run, tmp_path):
    result = run.train(genesis_request(run.model, CONFIG))
    assert result.reused
    policy = result.record.policy
    assert policy.version == 0
    assert policy.digest == policy_digest(run.model)
    assert policy.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert result.record.snapshot is not None
    assert result.record.state_digest is not None
    probe = read_probe(run.store, policy)
    assert [len(row) for row in probe.token_ids] == [16, 16]
    assert not {0, 1} & {token for row in probe.token_ids for token in row}
    assert policy_digest(open_policy(run.store, policy, cache=tmp_path)) == policy.digest


def test_step_without_a_record_continues_from_a_snapshot_and_replayed_steps(run, tmp_path):
    cold = run.copy(tmp_path / "copy")
    warm_record = run.copy(tmp_path / "warm").step()
    run.fresh_engine()
    cold_record = cold.step()
    assert cold_record.notes == ["replayed 2 steps to restore the state"]
    assert warm_record.notes == []
    assert cold_record.policy.digest == warm_record.policy.digest
    assert cold_record.state_digest == warm_record.state_digest
    assert cold_record.outputs["train"].sha256 == warm_record.outputs["train"].sha256
    assert cold_record.policy.version == 3


def test_replay_begins_at_the_nearest_snapshot(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    assert here.step(snapshot_due=True).snapshot is not None
    here.step()
    run.forget_state()
    assert here.step().notes == ["replayed 1 steps to restore the state"]


def test_second_call_returns_the_record_and_does_no_work(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    request, _ = train_request(here.store, CONFIG)
    first, second = here.train(request), here.train(request)
    assert (first.reused, second.reused) == (False, True)
    assert first.record == second.record
    attempts = here.directory / f"runs/{RUN}/steps/00000003/attempts"
    assert len([path for path in attempts.iterdir() if path.name != "hand"]) == 1


def test_nothing_to_train_gives_the_next_version_with_the_same_files(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    before = train_request(here.store, CONFIG)[0].policy
    record = here.step(rewards=[None] * 15 + [1.0])
    assert record.metrics["updates"] == 0
    assert record.policy == before.model_copy(update={"version": before.version + 1})
    rows = read_shard(here.store, record.outputs["train"], schema=TRAIN).to_pylist()
    assert [row["reason"] for row in rows] == ["grader_timeout"] * 15 + ["too_few_graded"]
    assert not any(row["kept"] or row["learner_logprobs"] for row in rows)
    # The state is untouched and stays held: what follows needs no restore, cold or warm.
    after = here.step()
    assert after.policy.digest != before.digest
    again = here.copy(tmp_path / "again")
    run.forget_state()
    assert again.step().notes == ["replayed 4 steps to restore the state"]


def test_train_shard_says_what_became_of_every_sample(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    rewards = [1, 0, 0, 0, 1, None, 0, 1, 1, 1, 1, 1, None, None, None, 1]
    record = here.step(rewards=rewards)
    rows = read_shard(here.store, record.outputs["train"], schema=TRAIN).to_pylist()
    assert [row["advantage"] for row in rows[:4]] == pytest.approx([1.5] + [-0.5] * 3, abs=1e-5)
    assert rows[5]["reason"] == "grader_timeout"
    assert [row["advantage"] for row in rows[8:12]] == [0.0] * 4
    assert rows[15]["reason"] == "too_few_graded"
    for row in rows:
        assert row["kept"] == (row["learner_logprobs"] is not None)
        assert row["kept"] == (row["reason"] is None)
    metrics = record.metrics
    assert metrics["samples_kept"] == 11
    assert metrics["dropped_grader_timeout"] == 4
    assert metrics["dropped_too_few_graded"] == 1
    assert (metrics["groups"], metrics["zero_std_groups"]) == (4, 1)


def spoil_snapshot(run: Run, step: int) -> None:
    """Flips a byte of a step's snapshot, in the store and out of this host's cache."""
    (path,) = (run.directory / f"runs/{RUN}/steps/{step:08d}").rglob("state-*.safetensors")
    digest = sha256_hex(path.read_bytes())
    path.chmod(0o600)
    broken = bytearray(path.read_bytes())
    broken[-1] ^= 1
    path.write_bytes(broken)
    run.lab("forget_cached", [digest])


def test_changed_snapshot_is_never_read_and_costs_only_a_longer_replay(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    here.step(snapshot_due=True)
    warm = run.copy(tmp_path / "warm")
    warm.step()
    expected = warm.step()
    spoil_snapshot(here, 3)
    run.forget_state()
    record = here.step()
    assert record.policy.digest == expected.policy.digest
    assert record.state_digest == expected.state_digest
    assert "the snapshot of step 3 cannot be read" in record.notes[0]
    assert record.notes[1] == "replayed 3 steps to restore the state"


def test_genesis_without_its_snapshot_is_imported_again(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    expected = run.copy(tmp_path / "warm").step()
    spoil_snapshot(here, 0)
    run.forget_state()
    record = here.step()
    assert record.state_digest == expected.state_digest
    assert record.notes[1:] == [
        "genesis was imported again from policy 0",
        "replayed 2 steps to restore the state",
    ]


def snapshot_request(run: Run, state_id: str) -> SnapshotRequest:
    scope = StepScope(run=RUN, step=2)
    return SnapshotRequest(scope=scope, state_id=state_id, ranks=1, zero_stage=2)


def test_snapshot_at_a_stop_is_where_the_next_restore_begins(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    state_id = train_request(here.store, CONFIG)[0].state_id
    run.forget_state()
    assert here.train(snapshot_request(here, state_id)).record is None
    expected = run.copy(tmp_path / "warm").step()
    run.lab("engine", "trainer", "adopt", expected.request["state_id"])
    run.forget_state()
    replayed = here.train(ReplayRequest(scope=StepScope(run=RUN, step=2)))
    assert replayed.outcome == "to the bit"
    made = here.train(snapshot_request(here, state_id)).record
    assert made.snapshot is not None
    assert here.train(snapshot_request(here, state_id)).record == made
    run.fresh_engine()
    record = here.step()
    assert record.notes == []
    assert record.state_digest == expected.state_digest


def test_every_committed_step_is_replayed_to_the_bit_and_nothing_is_written(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    before = sorted((here.directory / "runs").rglob("*"))
    run.forget_state()
    for step, replayed in ((0, 0), (1, 0), (2, 0)):
        result = here.train(ReplayRequest(scope=StepScope(run=RUN, step=step)))
        assert (result.outcome, result.replayed) == ("to the bit", replayed)
        assert result.policy_digest == result.expected_policy_digest
        assert result.environment_changes == []
    assert sorted((here.directory / "runs").rglob("*")) == before


def test_a_policy_that_was_given_up_comes_back_by_replay(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    policy = train_request(here.store, CONFIG)[0].policy
    (path,) = (here.directory / f"runs/{RUN}/steps/00000002").rglob("model*.safetensors")
    path.unlink()
    run.lab("forget_cached", [file.sha256 for file in policy.files])
    run.forget_state()
    with pytest.raises(NotFound):
        open_policy(here.store, policy, cache=product_home() / "cache")
    assert here.train(ReplayRequest(scope=StepScope(run=RUN, step=2))).outcome == "to the bit"
    again = open_policy(here.store, policy, cache=product_home() / "cache")
    assert policy_digest(again) == policy.digest
    assert not path.exists()


@pytest.fixture(scope="module")
def old_machine(run, tmp_path_factory) -> Iterator[Run]:
    """A trainer on a machine whose processor has fewer instructions."""
    root = tmp_path_factory.mktemp("old")
    lab = Lab(root / "log", ATEN_CPU_CAPABILITY="default", MKL_ENABLE_INSTRUCTIONS="SSE4_2")
    machine = Run(lab, run.model, root / "scratch", run.directory, run.store)
    machine.fresh_engine()
    yield machine
    lab.close()


@pytest.fixture
def elsewhere(old_machine, tmp_path) -> Run:
    """A copy of the run on that machine."""
    old_machine.forget_state()
    return old_machine.copy(tmp_path / "elsewhere")


def test_other_bits_under_another_environment_are_refused_by_name(elsewhere):
    with pytest.raises(Permanent, match=r"step \d.*instructions: \w+ -> DEFAULT.*--rebase"):
        elsewhere.step()


def test_rebase_takes_the_published_weights_and_says_so(elsewhere):
    request, records = train_request(elsewhere.store, CONFIG)
    allowed = request.model_copy(update={"rebase": True})
    assert allowed.digest() == request.digest()
    record = elsewhere.train(allowed).record
    commit(elsewhere.store, record, records)
    rebased = record.rebased
    assert rebased is not None
    assert set(rebased.steps) <= {1, 2}
    assert rebased.num_elements > 0
    assert 0 < rebased.max_abs_diff < 1e-3
    assert 0 < rebased.share < 0.1
    assert rebased.was != rebased.now
    assert record.snapshot is not None
    # From here on this environment's bits are the recorded ones.
    elsewhere.fresh_engine()
    after = elsewhere.step()
    assert after.rebased is None
    assert after.notes == []


def test_a_replay_beyond_tolerance_is_never_rebased(elsewhere):
    strict = CONFIG.model_copy(update={"rebase_tolerance": 0.0})
    request, _ = train_request(elsewhere.store, strict)
    with pytest.raises(Permanent, match=r"differ on average by .*no matter of rounding"):
        elsewhere.train(request.model_copy(update={"rebase": True}))


def test_a_replay_elsewhere_is_judged_by_its_distance(elsewhere):
    result = elsewhere.train(ReplayRequest(scope=StepScope(run=RUN, step=1)))
    assert result.outcome == "within tolerance"
    assert any("instructions" in change for change in result.environment_changes)
    assert 0 < result.share < 0.1
    strict = ReplayRequest(scope=StepScope(run=RUN, step=1), tolerance=0.0)
    assert elsewhere.train(strict).outcome == "not comparable"


def test_state_that_no_commit_ends_in_is_refused(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    request, _ = train_request(here.store, CONFIG)
    with pytest.raises(Permanent, match="ends in trainer state f00"):
        here.train(request.model_copy(update={"state_id": "f00"}))


def test_replay_that_gives_another_policy_stops(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    request, records = train_request(here.store, CONFIG)
    record = here.train(request).record
    assert record.policy is not None
    # A commit whose train record claims a policy that its experience does not give.
    claimed = record.policy.model_copy(update={"digest": "f" * 64})
    forged = record.model_copy(update={"policy": claimed})
    (path,) = (here.directory / f"runs/{RUN}/steps/00000003/stages/train").iterdir()
    path.chmod(0o600)
    path.write_bytes(forged.to_bytes())
    commit(here.store, forged, records)
    run.forget_state()
    with pytest.raises(Permanent, match=r"train stage of step 3 .* under the same environment"):
        here.step()
