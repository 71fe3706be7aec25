"""What the controller looks at before it spends time: its lease and the recent commits."""

import uuid
from pathlib import Path
from typing import Any, cast

import pytest

from flows import opening
from flows import run as flows_run
from flows.planning import genesis_plan
from flows.progress import Watcher
from flows.recipes import RECIPES
from flows.session import Session, Supersede
from storage import ledger
from storage.backends.memory import MemoryStore
from storage.errors import Corrupt, LeaseHeld, NotFound
from storage.layout import StepScope, commit_key, lease_key, run_key
from storage.leases import hold
from tasks.errors import Permanent
from tasks.train.contract import GenesisRequest
from tasks.workspace import Workspace
from tests.contract import complete_run, records
from tests.contract.faulty_store import FaultyStore


class Silent:
    """A watcher that nobody reads."""

    def say(self, text: str) -> None:
        """Says nothing."""


class KeysMayNotList(MemoryStore):
    """A store whose credentials may not list unfinished uploads."""

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        """Refuses, as S3 does."""
        raise NotFound("AccessDenied: ListMultipartUploads")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """A run at commit 0 that wants no evaluation; its engines were never started."""
    store = MemoryStore(uuid.uuid4().hex)
    record = records.run_record()
    digest = ledger.create_run(store, record)
    commit, newest, _ = ledger.put_commit(store, records.commit(0, digest))
    config = RECIPES["addition"]()
    quiet = config.evaluate.model_copy(update={"suites": {}})
    nothing = cast(Any, None)
    return Session(
        store=store,
        run=record,
        run_digest=digest,
        config=config.model_copy(update={"evaluate": quiet}),
        stages=nothing,
        workspace=Workspace(cache=tmp_path, scratch=tmp_path),
        watcher=cast(Watcher, Silent()),
        reports=nothing,
        head=(commit, newest),
    )


def test_a_controller_that_lost_its_lease_begins_no_step(
    session: Session, monkeypatch: pytest.MonkeyPatch
):
    begun: list[int] = []
    monkeypatch.setattr(flows_run, "step", lambda run, step: begun.append(step))
    with hold(session.store, "r", "controller", ttl_s=0.3) as lease:
        key = lease_key("r", "controller")
        theirs = lease.state.model_copy(update={"token": "theirs", "host": "elsewhere"})
        cast(MemoryStore, session.store).put(key, theirs.to_bytes())
        assert lease._ended.wait(10)
        with pytest.raises(LeaseHeld, match=r"took run 'r' over.*Nothing is lost"):
            flows_run._advance_session(session, 1, last=1, lease=lease)
    assert begun == []


def test_a_sweep_that_is_not_allowed_keeps_nobody_from_the_lease():
    store = KeysMayNotList(uuid.uuid4().hex)
    with opening.held(store, "r") as lease:
        assert not lease.lost


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_a_commit_missing_among_the_last_is_named_before_engines_start(lost: int):
    store = MemoryStore(uuid.uuid4().hex)
    previous = ledger.create_run(store, records.run_record())
    assert opening.checked_head(store, "r") is None
    for step in range(6):
        commit, previous, _ = ledger.put_commit(store, records.commit(step, previous))
    assert opening.checked_head(store, "r") == (commit, previous)
    store.delete(commit_key("r", lost))
    with pytest.raises(Corrupt, match=rf"steps/0000000{lost}/commit\.json|of step {lost} does"):
        opening.checked_head(store, "r")


def test_only_the_last_commits_are_read_before_engines_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(opening, "NUM_CHECKED_COMMITS", 2)
    store = FaultyStore(MemoryStore(uuid.uuid4().hex))
    previous = ledger.create_run(store, records.run_record())
    for step in range(6):
        _, previous, _ = ledger.put_commit(store, records.commit(step, previous))
    store.calls.clear()
    opening.checked_head(store, "r")
    read = {call for call in store.calls if call.startswith("get ")}
    commit_gets = {f"get {commit_key('r', step)}" for step in (3, 4, 5)}
    assert read == {f"get {run_key('r')}", *commit_gets}


def test_a_snapshot_of_a_stop_that_lost_a_file_is_not_named_by_the_next_commit():
    store = MemoryStore(uuid.uuid4().hex)
    written = complete_run.write_run(store, 1)
    assert opening.snapshot_to_name(store, written.commit) == []
    ref = complete_run.write_stop(store, written)
    assert opening.snapshot_to_name(store, written.commit) == [ref]
    made = ledger.read_record(store, ref)
    assert made.snapshot is not None
    # Else the step could be trained by replay, but never be committed.
    store.delete(next(iter(made.snapshot.files.values())).key)
    assert opening.snapshot_to_name(store, written.commit) == []


def test_a_genesis_that_is_redone_finds_none_of_its_records(session: Session):
    scope = StepScope(run=session.run.run, step=0)
    first, _ = genesis_plan(session, scope)
    session.supersede = Supersede("train", "lost object", afresh=True)
    again, _ = genesis_plan(session, scope)
    assert (first.redo, again.revision, again.redo, again.reason) == (0, 1, 1, "lost object")
    request = GenesisRequest(
        scope=scope,
        model=session.run.model,
        weights={},
        model_dir="",
        seed=1,
        config=session.config.train,
    )
    assert request.digest() != request.model_copy(update={"redo": again.redo}).digest()
    assert "redo" not in request.body()


def test_a_failed_evaluation_costs_no_step_that_is_still_to_come(
    session: Session, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []

    def fail(run: str, version: int) -> None:
        asked.append(version)
        raise Permanent("the object is lost")

    monkeypatch.setattr(flows_run, "evaluate", fail)
    measured = RECIPES["addition"]().evaluate
    session.config = session.config.model_copy(update={"evaluate": measured})
    flows_run._evaluate_if_due(session, 5)
    assert asked == [0]
    with pytest.raises(Permanent, match="lost"):
        flows_run._evaluate_if_due(session, 0)
