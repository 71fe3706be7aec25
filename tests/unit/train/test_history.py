"""States restored by replay, where some of it gives other bits; with a trainer of one weight."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from storage.layout import StepScope
from storage.ledger import head
from storage.object_store import ObjectStore
from storage.objects import cache_path
from storage.records import StageRecord
from tasks.train import stage
from tasks.train.contract import ReplayRequest, SnapshotRequest, TrainConfig
from tasks.train.history import Restored, hold_state
from tasks.workspace import Workspace
from tests.e2e.train_run import RUN, commit, genesis_request, new_run, train_request
from tests.unit.train.toy_engine import ToyEngine, write_weight

CONFIG = TrainConfig(learning_rate=1e-2, probe_rows=1, probe_tokens=4)


@dataclass
class Toy:
    """A run, and what its stages need besides an engine."""

    store: ObjectStore
    workspace: Workspace
    model: Path

    def genesis(self, engine: ToyEngine, config: TrainConfig = CONFIG) -> None:
        record = self.ask(genesis_request(self.model, config), engine).record
        commit(self.store, record, [])

    def step(self, engine: ToyEngine, **fields) -> StageRecord:
        request, records = train_request(self.store, CONFIG, snapshot_due=False)
        record = self.ask(request.model_copy(update=fields), engine).record
        commit(self.store, record, records)
        return record

    def ask(self, request, engine: ToyEngine):
        return stage.run(request, self.store, engine, workspace=self.workspace)

    def restore(self, engine: ToyEngine) -> Restored:
        newest, _ = head(self.store, RUN)
        scope = StepScope(run=RUN, step=newest.step + 1)
        how = {"workspace": self.workspace, "rebase": True, "tolerance": 0.5}
        return hold_state(self.store, engine, newest.state_id, scope=scope, **how)

    def stop(self, engine: ToyEngine) -> StageRecord | None:
        newest, _ = head(self.store, RUN)
        scope = StepScope(run=RUN, step=newest.step)
        request = SnapshotRequest(scope=scope, state_id=newest.state_id, ranks=1, zero_stage=2)
        return self.ask(request, engine).record

    def replay(self, step: int, engine: ToyEngine, **fields):
        return self.ask(ReplayRequest(scope=StepScope(run=RUN, step=step), **fields), engine)


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    write_weight(tmp_path / "model", 0.3)
    workspace = Workspace(cache=tmp_path / "cache", scratch=tmp_path / "scratch")
    workspace.scratch.mkdir()
    return Toy(new_run(tmp_path / "store"), workspace, tmp_path / "model")


def test_a_rebased_state_is_rebased_again_when_the_stage_is_tried_again(toy):
    engine, elsewhere = ToyEngine(), ToyEngine("SSE4", drift=1e-3)
    toy.genesis(engine)
    toy.step(engine)
    first = toy.restore(elsewhere)
    assert first.rebased is not None
    # As after a store that could not be reached: the record must still say what was rebased.
    assert toy.restore(elsewhere).rebased == first.rebased


def test_a_rebased_state_is_not_stored_as_that_of_its_step(toy):
    engine, elsewhere = ToyEngine(), ToyEngine("SSE4", drift=1e-3)
    toy.genesis(engine)
    toy.step(engine)
    toy.restore(elsewhere)
    assert toy.stop(elsewhere) is None
    toy.restore(engine)
    assert toy.stop(engine) is not None


def test_a_step_that_began_elsewhere_is_not_called_different_once_its_snapshot_is_gone(toy):
    engine, elsewhere = ToyEngine(), ToyEngine("SSE4", drift=1e-3)
    toy.genesis(engine)
    toy.step(engine)
    stopped = toy.stop(engine)
    made = toy.step(elsewhere)
    assert made.rebased is None
    assert toy.replay(2, elsewhere).outcome == "to the bit"
    for ref in stopped.snapshot.files.values():
        toy.store.delete(ref.key)
        cache_path(toy.workspace.cache, ref.sha256).unlink()
    cold = ToyEngine("SSE4", drift=1e-3)
    result = toy.replay(2, cold, rebase=True)
    assert result.environment_changes == []
    assert result.outcome == "within tolerance"
    assert toy.replay(2, cold, rebase=True, tolerance=0.0).outcome == "not comparable"


def test_a_step_that_differs_under_its_own_environment_is_named(toy):
    engine, forged = ToyEngine(), ToyEngine(drift=1e-3)
    toy.genesis(engine)
    toy.step(engine)
    assert toy.replay(1, forged).outcome == "differs"


def test_a_device_that_promises_no_bits_is_judged_by_its_distance(toy):
    engine, again = ToyEngine(device="H200"), ToyEngine(device="H200", drift=1e-3)
    toy.genesis(engine)
    toy.step(engine)
    assert toy.replay(1, again).outcome == "within tolerance"
    assert toy.replay(1, again, tolerance=0.0).outcome == "differs"


def test_a_step_without_an_update_is_replayed_in_whatever_precision_it_was_configured(toy):
    engine = ToyEngine()
    toy.genesis(engine)
    toy.step(engine)
    rounded = CONFIG.model_copy(update={"dtype": "bfloat16"})
    request, records = train_request(toy.store, rounded, rewards=[None] * 16)
    record = toy.ask(request, engine).record
    commit(toy.store, record, records)
    assert (record.metrics["updates"], record.policy.dtype) == (0.0, "float32")
    assert toy.restore(ToyEngine()).replayed == 2
    assert toy.replay(2, ToyEngine()).outcome == "to the bit"


def test_genesis_whose_weights_were_rounded_is_held_against_its_policy_alone(toy):
    rounded = CONFIG.model_copy(update={"dtype": "bfloat16"})
    engine = ToyEngine()
    toy.genesis(engine, rounded)
    again = ToyEngine()
    result = toy.replay(0, again)
    assert (result.outcome, result.expected_state_digest) == ("to the bit", None)
    # The masters are other ones than were recorded: nothing may continue from them.
    assert again.state_id is None
