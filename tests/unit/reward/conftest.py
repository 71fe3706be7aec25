"""Grading processes for the tests; a module of misbehaving graders is importable in them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.reward.contract import RewardConfig, RewardPart
from tasks.reward.pool import RewardPool

MISBEHAVING = "grader_fixtures.misbehaving"


@pytest.fixture(autouse=True)
def importable_fixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def misbehaving(importable_fixtures: None) -> Callable[..., RewardConfig]:
    def config(**settings: object) -> RewardConfig:
        options = {"once": settings.pop("once", None)}
        limits = {"cpu_limit_s": 1.0, "memory_limit_bytes": 256 << 20, **settings}
        part = RewardPart(kind=MISBEHAVING, name="bad", options=options)
        return RewardConfig.model_validate({"parts": [part.model_dump()], **limits})

    return config


@pytest.fixture
def pool(importable_fixtures: None, tmp_path: Path) -> Iterator[RewardPool]:
    with RewardPool([MISBEHAVING], workers=2, log_dir=tmp_path) as opened:
        yield opened
