"""Which stages of a committed step are run again, with what, and what is said of each."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows import replay as replay_flow
from flows.replay import Engines, open_engines, replay_step, trained_detail
from storage.layout import commit_key
from storage.ledger import put_record
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import RecordRef, StepCommit
from storage.store_config import StoreConfig
from tasks.client import InProcess
from tasks.errors import Permanent, Transient
from tasks.rollout import stage as rollout_stage
from tasks.rollout.contract import RolloutRequest
from tasks.train.contract import ReplayRequest as TrainReplayRequest
from tasks.train.contract import ReplayResult as TrainReplayResult
from tasks.train.contract import TrainConfig
from tasks.workspace import Workspace
from tests.contract.records import commit as small_commit
from tests.contract.records import run_record, stage_record
from tests.unit.rollout.seeded_engine import SeededEngine
from tests.unit.rollout.small_shard import CONFIG, SCOPE, request_in

TRAINED = TrainReplayResult(
    outcome="to the bit",
    policy_digest="p",
    expected_policy_digest="p",
    state_digest=None,
    expected_state_digest=None,
    train_sha256="t",
    expected_train_sha256="t",
    environment_changes=[],
    replayed=0,
)


@dataclass
class Trainer:
    """Says what it is told to, error by error and then the result."""

    answers: list[TrainReplayResult | Exception] = field(default_factory=lambda: [TRAINED])
    asked: list[Any] = field(default_factory=list)

    def run(self, request: Any, result_type: Any) -> Any:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Here(Engines):
    """Engines of this process: a sampler without a model, a trainer that is told what to say."""

    def __init__(self, trainer: Any, sampler: Any) -> None:
        self._clients = {"train": trainer, "rollout": sampler}
        self.say = lambda message: None
        self.begun: list[str] = []

    def begin(self, name: str, config: dict[str, Any]) -> None:
        self.begun.append(name)

    def ready(self, name: str, config: dict[str, Any]) -> Any:
        return self._clients[name]


@dataclass(frozen=True)
class Step:
    """A committed step in a store, and engines to run it again."""

    store: ObjectStore
    commit: StepCommit
    engines: Here
    trainer: Trainer
    request: RolloutRequest

    def replayed(self, engines: Engines | None = None, commit: StepCommit | None = None) -> Any:
        return replay_step(
            commit or self.commit,
            store=self.store,
            run=run_record().model_copy(update={"model": self.request.model}),
            engines=engines or self.engines,
        )


def stored(store: ObjectStore, stage: str, **fields: Any) -> RecordRef:
    return put_record(store, SCOPE, stage_record(stage, **fields))[1]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return Workspace(cache=tmp_path / "cache", scratch=scratch)


@pytest.fixture
def step(tmp_path: Path, workspace: Workspace) -> Step:
    store = open_store(StoreConfig(uri=str(tmp_path / "store")), writing=True)
    request = request_in(store, tmp_path)
    sampler = InProcess(
        rollout_stage, store=store, engine=SeededEngine(CONFIG), workspace=workspace
    )
    sampled = [
        rollout_stage.run(
            request.model_copy(update={"shard": shard}),
            store,
            SeededEngine(CONFIG),
            workspace=workspace,
        ).record
        for shard in (1, 0)
    ]
    before = small_commit(2, "x").model_copy(update={"policy": request.policy})
    store.put(commit_key("r", 2), before.to_bytes())
    refs = [
        stored(store, "prompts", outputs={"prompts": request.prompts}),
        *[put_record(store, SCOPE, record)[1] for record in sampled],
        stored(store, "reward-0000"),
        stored(store, "train", body={"config": TrainConfig().request_fields()}),
    ]
    commit = small_commit(3, before.content_digest()).model_copy(update={"records": refs})
    trainer = Trainer()
    return Step(store, commit, Here(trainer, sampler), trainer, request)


def test_train_comes_first_then_every_shard_in_order(step: Step) -> None:
    outcomes = step.replayed()
    assert [(one.stage, one.outcome) for one in outcomes] == [
        ("train", "to the bit"),
        ("rollout-0000", "to the bit"),
        ("rollout-0001", "to the bit"),
    ]
    assert step.trainer.asked == [TrainReplayRequest(scope=SCOPE, rebase=True)]
    assert outcomes[1].detail.startswith("10 samples, ")
    assert step.engines.begun == ["train", "rollout", "rollout"]


def test_a_step_that_trained_nothing_has_nothing_to_run_again(step: Step) -> None:
    for kind in ("skipped", "fork"):
        assert step.replayed(commit=step.commit.model_copy(update={"kind": kind})) == []


def test_a_commit_before_that_was_changed_gives_no_policy_to_sample_from(step: Step) -> None:
    other = small_commit(2, "y").model_copy(update={"policy": step.request.policy})
    step.store.put(commit_key("r", 2), other.to_bytes())
    train, *shards = step.replayed()
    assert train.outcome == "to the bit"
    assert [shard.outcome for shard in shards] == ["failed", "failed"]
    assert "Corrupt: The chain of run 'r' breaks at runs/r/steps/00000002" in shards[0].detail


def test_a_record_that_is_gone_is_named_and_the_others_are_replayed(step: Step) -> None:
    lost = next(ref for ref in step.commit.records if ref.stage == "rollout-0000")
    step.store.delete(lost.key)
    outcomes = {one.stage: one for one in step.replayed()}
    assert outcomes["rollout-0000"].outcome == "failed"
    assert lost.key in outcomes["rollout-0000"].detail
    assert outcomes["rollout-0001"].outcome == "to the bit"


def test_a_config_of_another_version_is_not_checked(step: Step) -> None:
    foreign = stored(step.store, "train", body={"config": {"unheard_of": 1}})
    commit = step.commit.model_copy(update={"records": [foreign]})
    [train] = step.replayed(commit=commit)
    assert train.outcome == "not checked"
    assert "unheard_of" in train.detail


def test_a_process_that_dies_is_asked_again_and_not_for_ever(step: Step) -> None:
    died = Transient("The train process 7 was ended by signal 9.")
    step.trainer.answers = [died, died, TRAINED]
    assert step.replayed()[0].outcome == "to the bit"
    step.trainer.answers = [died, died, died]
    train = step.replayed()[0]
    assert (train.outcome, train.detail) == ("failed", str(died))


def test_what_an_engine_refuses_is_a_failure_and_not_a_difference(step: Step) -> None:
    step.trainer.answers = [Permanent("the probe disagrees")]
    train = step.replayed()[0]
    assert (train.outcome, train.detail) == ("failed", "the probe disagrees")


def test_without_an_engines_environment_nothing_is_checked_and_it_is_tried_once(
    step: Step, tmp_path: Path, workspace: Workspace
) -> None:
    with open_engines(
        run_record(),
        store=StoreConfig(uri=str(tmp_path / "store")),
        workspace=workspace,
        python="/no/such/python",
    ) as engines:
        outcomes = step.replayed(engines)
    assert {one.outcome for one in outcomes} == {"not checked"}
    assert "the train engine does not start here: " in outcomes[0].detail
    assert "/no/such/python" in outcomes[0].detail


class Started:
    """Stands for a child process: notes when it is started and closed."""

    log: list[str]

    def __init__(self, spec: Any, **_: Any) -> None:
        self.spec = spec

    def start(self) -> None:
        assert not self.spec.writing
        self.log.append(f"start {self.spec.name} {self.spec.config['threads']}")

    def wait_ready(self) -> None:
        pass

    def close(self) -> None:
        self.log.append(f"close {self.spec.name} {self.spec.config['threads']}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    Started.log = []
    monkeypatch.setattr(replay_flow, "Child", Started)
    return Started.log


def test_an_engine_is_started_again_only_for_other_limits(
    log: list[str], tmp_path: Path, workspace: Workspace
) -> None:
    store = StoreConfig(uri=str(tmp_path))
    with open_engines(run_record(), store=store, workspace=workspace) as engines:
        for threads in (1, 1, 2):
            engines.ready("rollout", {"threads": threads})
        engines.ready("train", {"threads": 1})
    assert log == [
        "start rollout 1",
        "close rollout 1",
        "start rollout 2",
        "start train 1",
        "close rollout 2",
        "close train 1",
    ]


def test_a_replayed_update_is_told_by_what_differs_or_by_how_much() -> None:
    assert trained_detail(TRAINED) == "policy, train shard"
    other = TRAINED.model_copy(update={"policy_digest": "q", "outcome": "differs"})
    assert trained_detail(other) == "policy: expected p, found q"
    close = other.model_copy(
        update={"outcome": "within tolerance", "share": 0.01, "max_abs_diff": 1e-7}
    )
    assert trained_detail(close) == (
        "weights differ by 0.01 of what the step changed them, by at most 1e-07"
    )
