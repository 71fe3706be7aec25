"""What becomes of the state that a trainer holds when its ranks must be others."""

from pathlib import Path
from typing import Any

import pytest

from tasks.train import build, engine
from tasks.train.contract import TrainConfig
from tasks.workspace import Workspace

CONFIG = TrainConfig()
OTHER = CONFIG.model_copy(update={"clip_norm": CONFIG.clip_norm / 2})


class ToyRanks:
    """Ranks that hold one text as their weights, and write it as their snapshot."""

    def __init__(self, config: TrainConfig, **_: Any) -> None:
        self.config, self.weights, self.closed = config, "", False
        self.pids = [1]

    def call(self, name: str, directory: str) -> list[None]:
        snapshot = Path(directory) / "state"
        if name == "save_snapshot":
            snapshot.write_text(self.weights)
        elif name == "restore":
            self.weights = snapshot.read_text()
        else:
            self.weights = directory
        return [None]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> engine.Engine:
    monkeypatch.setattr(engine, "Ranks", ToyRanks)
    monkeypatch.setattr(build, "ensure", lambda cache: cache)
    workspace = Workspace(scratch=tmp_path, cache=tmp_path / "cache")
    return engine.Engine(CONFIG, model_dir=tmp_path, workspace=workspace)


def test_a_state_that_has_no_name_yet_moves_to_other_ranks(trainer):
    # As in a replay: a snapshot is restored, and the next step was made with another config.
    trainer.initialise(Path("weights"))
    trainer.configure(OTHER)
    ranks = trainer.open()
    assert (ranks.weights, ranks.config) == ("weights", OTHER)
    assert trainer.state_id is None


def test_a_named_state_keeps_its_name_on_other_ranks(trainer):
    trainer.initialise(Path("weights"))
    trainer.adopt("state")
    trainer.configure(OTHER)
    assert (trainer.open().weights, trainer.state_id) == ("weights", "state")


def test_ranks_without_weights_are_replaced_with_nothing_to_move(trainer):
    trainer.open()
    trainer.configure(OTHER)
    assert (trainer.open().weights, trainer.state_id) == ("", None)
