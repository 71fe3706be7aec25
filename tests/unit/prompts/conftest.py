from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.experience import read_shard
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.records import InputRef, ObjectRef, PromptInputs
from storage.schemas import PROMPTS
from storage.store_config import StoreConfig
from tasks.prompts.contract import PrepareRequest, PromptsConfig
from tasks.prompts.prepare import prepare
from tests.unit.prompts.tiny_tokenizer import save_tokenizer

Prepare = Callable[..., PromptInputs]


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("plain"), bos=False)


@pytest.fixture(scope="session")
def bos_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("bos"), bos=True)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreConfig(uri=f"memory://{tmp_path.name}-{id(tmp_path)}"), writing=True)


@pytest.fixture
def prepare_sets(store: ObjectStore, plain_tokenizer: Path, tmp_path: Path) -> Prepare:
    """Prepares `datasets` (their configs as dicts) with the tokenizer without BOS."""

    def call(
        *datasets: dict[str, Any],
        seed: int = 0,
        limit: int = 1000,
        tokenizer_dir: Path = plain_tokenizer,
        **config: Any,
    ) -> PromptInputs:
        settings = {"groups_per_step": 1, **config, "datasets": list(datasets)}
        request = PrepareRequest(
            config=PromptsConfig.model_validate(settings),
            seed=seed,
            tokenizer=InputRef(digest="of-the-test", files={}),
            max_prompt_tokens=limit,
        )
        return prepare(request, store, tokenizer_dir=tokenizer_dir, cache=tmp_path / "cache")

    return call


@pytest.fixture
def read_rows(store: ObjectStore) -> Callable[[ObjectRef], list[dict[str, Any]]]:
    return lambda ref: read_shard(store, ref, schema=PROMPTS).to_pylist()
