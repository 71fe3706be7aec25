"""The train stage over a store: genesis, steps, restoring by replay, and what it refuses."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from storage.errors import Corrupt
from storage.experience import read_shard
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.policies import open_policy, policy_digest, read_probe
from storage.records import StageRecord
from storage.schemas import TRAIN
from storage.store_config import StoreConfig
from tasks.errors import Permanent
from tasks.train.contract import TrainConfig, TrainResult
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

    def train(self, request) -> TrainResult:
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


def test_changed_snapshot_is_found_before_it_is_read(run, tmp_path):
    here = run.copy(tmp_path / "copy")
    (path,) = (here.directory / f"runs/{RUN}/steps/00000000").rglob("state-*.safetensors")
    path.chmod(0o600)
    broken = bytearray(path.read_bytes())
    broken[-1] ^= 1
    path.write_bytes(broken)
    # The cache of this host still has the right bytes under the right digest; take them away.
    genesis = here.train(genesis_request(run.model, CONFIG)).record
    run.lab("forget_cached", [ref.sha256 for ref in genesis.snapshot.files.values()])
    run.forget_state()
    with pytest.raises(Corrupt, match=r"snapshot/state-00001-of-00001\.safetensors"):
        here.step()


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
    with pytest.raises(Permanent, match="Replaying step 3 gave policy"):
        here.step()
