"""The stores that the contract suite runs over, one fixture parameter each."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.object_store import ObjectStore
from storage.opening import create_bucket, open_store
from storage.store_config import StoreConfig
from tests.contract.s3_servers import ACCESS_KEY, BUCKET, SECRET_KEY, moto_server, seaweed_server

ALL_STORES = ["memory", "local", "moto", pytest.param("seaweed", marks=pytest.mark.s3)]
S3_STORES = ["moto", pytest.param("seaweed", marks=pytest.mark.s3)]


@pytest.fixture(scope="session", autouse=True)
def s3_credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        patch.delenv("AWS_PROFILE", raising=False)
        yield


@pytest.fixture(scope="session")
def moto_endpoint(s3_credentials: None) -> Iterator[str]:
    with moto_server() as endpoint:
        create_bucket(StoreConfig(uri=f"s3://{BUCKET}", endpoint=endpoint))
        yield endpoint


@pytest.fixture(scope="session")
def seaweed_endpoint(
    s3_credentials: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with seaweed_server(tmp_path_factory.mktemp("seaweed")) as endpoint:
        yield endpoint


@pytest.fixture
def make_config(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], StoreConfig]:
    """Returns the address of a fresh, empty store of a kind; servers start when first asked."""

    def make(kind: str) -> StoreConfig:
        name = uuid.uuid4().hex
        if kind == "memory":
            return StoreConfig(uri=f"memory://{name}")
        if kind == "local":
            return StoreConfig(uri=str(tmp_path / "store"))
        endpoint: str = request.getfixturevalue(f"{kind}_endpoint")
        return StoreConfig(uri=f"s3://{BUCKET}/{name}", endpoint=endpoint)

    return make


@pytest.fixture(params=ALL_STORES)
def store_config(
    request: pytest.FixtureRequest, make_config: Callable[[str], StoreConfig]
) -> StoreConfig:
    return make_config(request.param)


@pytest.fixture
def store(store_config: StoreConfig) -> ObjectStore:
    """An empty store. What opening one for writing checks has its own tests, and costs requests."""
    if store_config.scheme == "file":
        create_bucket(store_config)
    return open_store(store_config, writing=False)


@pytest.fixture(params=S3_STORES)
def s3_config(
    request: pytest.FixtureRequest, make_config: Callable[[str], StoreConfig]
) -> StoreConfig:
    return make_config(request.param)
