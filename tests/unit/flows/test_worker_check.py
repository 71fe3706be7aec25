"""A worker with other libraries or code than the run's last steps is refused, unless allowed."""

import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import flows.worker_check as worker_check
from flows.config import RunConfig
from flows.recipes import RECIPES
from flows.worker_check import check_worker
from storage import environment
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig
from tasks.errors import Permanent
from tasks.rollout.stage import PACKAGES


@pytest.fixture
def store() -> ObjectStore:
    return open_store(StoreConfig(uri=f"memory://{uuid.uuid4().hex}"), writing=True)


def asked(python: str = sys.executable, **placement: Any) -> RunConfig:
    config = RECIPES["addition"]()
    return config.model_copy(
        update={
            "placement": config.placement.model_copy(update=placement),
            "rollout": config.rollout.model_copy(update={"python": python}),
            "train": config.train.model_copy(update={"python": python}),
        }
    )


def knows(monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    """Makes the run's last rollout one of this interpreter, but for what changed."""
    here = environment.describe(PACKAGES) | changed
    monkeypatch.setattr(
        worker_check, "known_environment", lambda _, __, stage: here if stage == "rollout" else {}
    )


def test_the_same_environment_is_taken(store: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    knows(monkeypatch, processor="another one of the pool")
    check_worker(store, "made", asked())


def test_other_code_or_libraries_are_refused_by_name(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
):
    knows(monkeypatch, **{"code": "another", "package:pyarrow": "1.0"})
    with pytest.raises(Permanent, match=r"code: another -> .*package:pyarrow: 1\.0 -> .*allow_oth"):
        check_worker(store, "made", asked())
    check_worker(store, "made", asked(allow_other_environment=True))
    # Services answer for themselves.
    check_worker(store, "made", asked(rollout="service"))


def test_a_run_without_steps_takes_any(store: ObjectStore):
    check_worker(store, "made", asked(python="/nowhere"))


def test_an_interpreter_that_is_not_there_is_named(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    knows(monkeypatch)
    with pytest.raises(Permanent, match=r"cannot be asked what it has.*make install"):
        check_worker(store, "made", asked(python=str(tmp_path / "python")))
