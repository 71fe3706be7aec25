import os
from pathlib import Path

import pytest

from flows import stores
from flows.stores import resolve_store, store_options
from infra.services import LocalServices

ENDPOINT = "http://127.0.0.1:8333"
VARIABLES = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "DEFAULT_REGION")


@pytest.fixture(autouse=True)
def _local_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(
        "[rollbook]\naws_access_key_id = local\naws_secret_access_key = local-secret\n"
    )
    local = LocalServices(
        prefect_api_url="",
        prefect_ui_url="",
        s3_endpoint=ENDPOINT,
        s3_bucket="rollbook",
        credentials_path=str(credentials),
    )
    monkeypatch.setattr(stores, "local_services", lambda: local)
    for name in ("ROLLBOOK_STORE", "ROLLBOOK_ENDPOINT", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "my-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "my-session")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)


def credentials() -> list[str | None]:
    return [os.environ.get(f"AWS_{name}") for name in VARIABLES]


def test_another_store_gets_the_callers_credentials_back():
    before = credentials()
    resolve_store()
    resolve_store()
    assert credentials() == ["local", "local-secret", None, "us-east-1"]
    resolve_store("s3://mine")
    assert credentials() == before == ["mine", "my-secret", "my-session", None]


def test_credentials_that_the_caller_sets_meanwhile_stay(monkeypatch: pytest.MonkeyPatch):
    resolve_store()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "newer")
    resolve_store("s3://mine")
    assert os.environ["AWS_ACCESS_KEY_ID"] == "newer"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "my-secret"


def test_only_the_default_store_needs_no_options(monkeypatch: pytest.MonkeyPatch):
    assert store_options("s3://rollbook", ENDPOINT) == []
    assert store_options("s3://rollbook", None) == ["--store", "s3://rollbook"]
    monkeypatch.setenv("ROLLBOOK_STORE", "elsewhere")
    assert store_options("s3://rollbook", ENDPOINT)[2:] == ["--endpoint", ENDPOINT]
