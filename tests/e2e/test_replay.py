"""A real run, run again from a copy of its store: every stage to the bit, and nothing written."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.replay import Engines, Replayed, open_engines, replay_step
from storage.ledger import commits, read_run
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import RunRecord, StepCommit
from storage.store_config import StoreConfig
from tasks.workspace import open_workspace
from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@dataclass(frozen=True)
class Copy:
    """A copy of a run's store, open for reading, with engines to run it again."""

    directory: Path
    store: ObjectStore
    run: RunRecord
    engines: Engines

    def commits(self) -> list[StepCommit]:
        return [commit for commit, _ in commits(self.store, self.run.run)]

    def replayed(self, commit: StepCommit) -> list[Replayed]:
        return replay_step(commit, store=self.store, run=self.run, engines=self.engines)

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def copy(
    cli: Cli,
    finished: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch_module: pytest.MonkeyPatch,
) -> Iterator[Copy]:
    directory = shutil.copytree(finished, tmp_path_factory.mktemp("replay") / "copy")
    monkeypatch_module.setenv("ROLLBOOK_HOME", str(cli.home))
    config = StoreConfig(uri=str(directory))
    store = open_store(config, writing=False)
    record, _ = read_run(store, "finished")
    with (
        open_workspace(cli.home) as workspace,
        open_engines(record, store=config, workspace=workspace) as engines,
    ):
        yield Copy(directory, store, record, engines)


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_every_stage_of_every_step_comes_out_to_the_bit_and_nothing_is_written(
    copy: Copy,
) -> None:
    before = copy.files()
    outcomes = [one for commit in copy.commits() for one in copy.replayed(commit)]
    assert {(one.outcome, *one.environment_changes) for one in outcomes} == {("to the bit",)}
    shards = ["train", "rollout-0000", "rollout-0001"]
    expected = [(0, "train"), *[(step, stage) for step in (1, 2, 3) for stage in shards]]
    assert [(one.step, one.stage) for one in outcomes] == expected
    assert copy.files() == before


def test_a_lost_shard_fails_its_own_replay_and_that_of_the_update_it_was_for(copy: Copy) -> None:
    commit = copy.commits()[2]
    [samples] = copy.directory.glob("runs/*/steps/00000002/attempts/*/rollout-0001.parquet")
    kept = samples.read_bytes()
    samples.unlink()
    outcomes = {one.stage: one for one in copy.replayed(commit)}
    samples.write_bytes(kept)
    assert {stage: one.outcome for stage, one in outcomes.items()} == {
        "train": "failed",
        "rollout-0000": "to the bit",
        "rollout-0001": "failed",
    }
    assert samples.name in outcomes["rollout-0001"].detail
    assert {one.outcome for one in copy.replayed(commit)} == {"to the bit"}
