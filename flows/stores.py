"""Which store and which Prefect server a command talks to, and with whose credentials."""

import configparser
import os
from collections.abc import Callable

from infra.services import LocalServices, local_services
from storage.errors import BucketMissing
from storage.opening import create_bucket, open_store
from storage.store_config import StoreConfig

STORE_VARIABLE = "ROLLBOOK_STORE"
ENDPOINT_VARIABLE = "ROLLBOOK_ENDPOINT"

_displaced: dict[str, tuple[str | None, str | None]] = {}
"""What the local server's credentials displaced in this process's environment: (before, ours)."""


def resolve_store(uri: str | None = None, endpoint: str | None = None) -> StoreConfig:
    """Returns the store that a command was given, or the default one.

    `uri`, else `ROLLBOOK_STORE` (with `ROLLBOOK_ENDPOINT`), else the S3 server of `make up`.
    For that server its own credentials are put into this process's environment, where boto3's
    credential chain, and that of the engines, finds them. The caller's own come back when another
    store is resolved, so that a notebook can go from one to the other.

    Raises:
        ValueError: nothing was named and no local server runs.
    """
    local = local_services()
    chosen = uri or os.environ.get(STORE_VARIABLE)
    address = endpoint or os.environ.get(ENDPOINT_VARIABLE) or os.environ.get("AWS_ENDPOINT_URL_S3")
    if chosen is None:
        if local is None:
            raise ValueError(
                "No store was named and no local S3 server runs. Run `make up`, or pass "
                "--store s3://bucket/prefix (with --endpoint) or --store DIRECTORY, or set "
                f"{STORE_VARIABLE}."
            )
        chosen, address = _default(local)
    if local is not None and address == local.s3_endpoint:
        _use_credentials(local)
    else:
        _give_back_credentials()
    return StoreConfig(uri=chosen, endpoint=address if chosen.startswith("s3://") else None)


def _use_credentials(local: LocalServices) -> None:
    """Puts the local server's credentials where boto3 looks, and remembers what stood there."""
    _give_back_credentials()
    parser = configparser.ConfigParser()
    parser.read(local.credentials_path)
    section = parser[parser.sections()[0]]
    ours = {
        "AWS_ACCESS_KEY_ID": section["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": section["aws_secret_access_key"],
        "AWS_SESSION_TOKEN": None,
        "AWS_DEFAULT_REGION": os.environ.get("AWS_DEFAULT_REGION", "us-east-1"),
    }
    for name, value in ours.items():
        _displaced[name] = (os.environ.get(name), value)
        _set_variable(name, value)


def _give_back_credentials() -> None:
    """Puts back what `_use_credentials` displaced, except what was changed since."""
    for name, (before, ours) in _displaced.items():
        if os.environ.get(name) == ours:
            _set_variable(name, before)
    _displaced.clear()


def _set_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def store_options(uri: str, endpoint: str | None) -> list[str]:
    """Returns the options that make a command talk to this store, in any shell on this machine.

    None for the local server, which is where a command goes that says nothing.
    """
    local = local_services()
    is_local = local is not None and (uri, endpoint) == _default(local)
    if is_local and STORE_VARIABLE not in os.environ:
        return []
    return ["--store", uri, *(["--endpoint", endpoint] if endpoint else [])]


def _default(local: LocalServices) -> tuple[str, str]:
    return f"s3://{local.s3_bucket}", local.s3_endpoint


def ensure_bucket(config: StoreConfig, *, may_create: Callable[[str], bool]) -> None:
    """Creates the store's bucket if it is missing and `may_create(its name)` says so.

    Raises:
        BucketMissing: it is missing and may not be created.
        Unavailable: the store cannot be reached, or refuses.
    """
    try:
        open_store(config, writing=False)
    except BucketMissing:
        if not may_create(config.bucket):
            raise
        create_bucket(config)
