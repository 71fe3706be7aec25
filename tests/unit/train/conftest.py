"""One child in the engines' environment for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.train.lab import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    opened = Lab(tmp_path_factory.mktemp("lab") / "log")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def tiny_model(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "qwen2"
    lab("make_model", directory, "qwen2", True)
    return directory
