"""How a resume goes on as wished: which config, from which step, and what of the open one."""

import uuid

import pytest

from flows.changes import config_as_of
from flows.phases import Phase, Wishes, phases
from flows.recipes import RECIPES
from flows.session import Supersede
from storage import ledger
from storage.backends.memory import MemoryStore
from storage.records import RunRecord
from tests.contract import records

CONFIG = RECIPES["addition"]()
OTHER = CONFIG.model_dump(mode="json") | {"max_silent_steps": 9}


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture
def run(store: MemoryStore) -> RunRecord:
    """A run at commit 1, whose plans carry its config."""
    record = records.run_record().model_copy(update={"config": CONFIG.model_dump(mode="json")})
    previous = ledger.create_run(store, record)
    for step in (0, 1):
        planned = records.plan(step).model_copy(update={"configs": record.config})
        _, ref = ledger.adopt_plan(store, planned)
        commit = records.commit(step, previous).model_copy(update={"plan": ref})
        _, previous, _ = ledger.put_commit(store, commit)
    return record


def open_step(store: MemoryStore, configs: dict | None = None) -> None:
    """Plans step 2, which is not committed."""
    configs = configs or CONFIG.model_dump(mode="json")
    ledger.adopt_plan(store, records.plan(2).model_copy(update={"configs": configs}))


SLOWER = Wishes(overrides=("train.learning_rate=1e-6",))


def test_without_wishes_a_run_goes_on_with_the_config_of_its_last_plan(store, run):
    assert phases(store, run, Wishes(), last=5) == [Phase(CONFIG, 5)]
    open_step(store, OTHER)
    (phase,) = phases(store, run, Wishes(), last=5)
    assert phase.config.max_silent_steps == 9


def test_another_config_holds_from_the_next_step_on(store, run):
    (phase,) = phases(store, run, SLOWER, last=5)
    assert phase.config.train.learning_rate == 1e-6
    assert (phase.until, phase.supersede) == (5, None)


def test_an_open_step_is_finished_with_the_config_of_its_plan(store, run):
    open_step(store)
    first, rest = phases(store, run, SLOWER, last=5)
    assert (first.until, first.config) == (2, CONFIG)
    assert (rest.until, rest.config.train.learning_rate) == (5, 1e-6)


def test_redo_gives_the_open_step_the_new_config_and_its_reason(store, run):
    open_step(store)
    (phase,) = phases(store, run, Wishes(SLOWER.overrides, redo=True, reason="why"), last=5)
    assert phase.config.train.learning_rate == 1e-6
    assert phase.supersede == Supersede("train", "why", afresh=False)


def test_redo_with_nothing_changed_does_all_work_afresh(store, run):
    open_step(store)
    (phase,) = phases(store, run, Wishes(redo=True), last=5)
    assert phase.supersede == Supersede("train", "asked for", afresh=True)


def test_skip_passes_over_the_open_step_and_goes_on_as_wished(store, run):
    open_step(store)
    wishes = Wishes(SLOWER.overrides, skip_step=True)
    (phase,) = phases(store, run, wishes, last=5)
    assert (phase.until, phase.config.train.learning_rate) == (5, 1e-6)
    assert phase.supersede is not None
    assert phase.supersede.kind == "skipped"
    assert "learning_rate" in phase.supersede.reason


@pytest.mark.parametrize(
    ("wishes", "cause"),
    [
        (Wishes(redo=True), "no plan yet.*rollbook fork r@0"),
        (Wishes(redo=True, skip_step=True), "exclude each other"),
        (Wishes(reason="why"), "reason is for a step"),
        (Wishes(("steps=9",)), "resume r --steps N"),
        (Wishes(("seed=3",)), "seed decide.*rollbook fork r@1 --run NEW --set seed=3"),
        (Wishes(("prompts.template=true",)), r"prompts\.template decide.*rollbook fork"),
        (Wishes(("prompts.datasets.0.weight=2",)), r"prompts\.datasets decide.*rollbook fork"),
        (Wishes(("model.path=/other",)), "Launch another run"),
        (Wishes(("train.learning_rate=fast",)), "learning_rate"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_with_what_would(store, run, wishes, cause):
    with pytest.raises(ValueError, match=cause):
        phases(store, run, wishes, last=5)


def test_the_first_step_of_a_run_cannot_be_skipped(store):
    record = records.run_record().model_copy(update={"config": CONFIG.model_dump(mode="json")})
    ledger.create_run(store, record)
    with pytest.raises(ValueError, match="no policy before it"):
        phases(store, record, Wishes(skip_step=True), last=5)


def test_a_plan_without_configs_of_an_old_run_means_the_runs_own():
    record = records.run_record().model_copy(update={"config": CONFIG.model_dump(mode="json")})
    assert config_as_of(record, records.plan(1)) == CONFIG
