"""A store and a workspace of its own for every test."""

from pathlib import Path

import pytest

from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig
from tasks.workspace import Workspace


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreConfig(uri=str(tmp_path / "store")), writing=True)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(cache=tmp_path / "cache", scratch=tmp_path / "scratch")
