"""Objects in S3 or a server that speaks it. The only file that knows boto3.

Two clients: bulk transfers are idempotent, so boto3 retries them; conditional puts are sent once
per try and settled here, because a retry inside boto3 would hide a lost answer.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import boto3.session
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError

from storage.backends.s3_errors import (
    LOST,
    NEVER_SENT,
    REFUSED,
    TRY_AGAIN,
    explain,
    kind_of,
    must_create,
    server_time,
)
from storage.errors import (
    AlreadyExists,
    CommitConflict,
    CommitUnknown,
    NotFound,
    StorageError,
    Unavailable,
)
from storage.object_store import Listed
from storage.store_config import StoreConfig

CONNECT_TIMEOUT_S = 3
READ_TIMEOUT_S = 60
CONDITIONAL_READ_TIMEOUT_S = 20
NUM_BULK_TRIES = 3
PAUSES_S = (0.0, 0.1, 0.4, 1.0, 2.0)
"""Before each try of a conditional put."""

PART_BYTES = 16 << 20
MAX_PARTS = 9_000
"""S3 allows 10,000; larger objects get larger parts."""
NUM_STREAMS = 4
"""Parts of one object in flight."""
NUM_CONNECTIONS = 32

AWS_DOMAINS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")
"""Every other server is custom: it gets path-style addresses and no headers newer than itself."""

_Returned = TypeVar("_Returned")


def open_s3(config: StoreConfig) -> "S3Store":
    """Returns the store at `s3://bucket/prefix`; nothing is sent yet.

    Raises:
        Unavailable: no credentials, or an endpoint that is no URL.
    """
    return S3Store(config)


def create_bucket(config: StoreConfig) -> None:
    """Creates the bucket of `config`. One that is ours already is no error.

    Raises:
        Unavailable: not reachable, or not allowed.
    """
    client = _client(_session(config), config, num_tries=NUM_BULK_TRIES, signed=True)
    region = client.meta.region_name
    # us-east-1 is the one region that may not be named here.
    options: dict[str, Any] = (
        {}
        if _is_custom(client) or region == "us-east-1"
        else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    )
    try:
        client.create_bucket(Bucket=config.bucket, **options)
    except (ClientError, BotoCoreError) as error:
        if must_create(error):
            raise explain(error, config, key="") from error


@dataclass(frozen=True)
class _Outcome:
    """What came of one try of a conditional put."""

    kind: Literal["written", "refused", "again", "lost", "never sent", "failed"]
    etag: str = ""
    error: Exception | None = None


class S3Store:
    """An `ObjectStore` over boto3."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._bucket = config.bucket
        self._prefix = f"{config.prefix}/" if config.prefix else ""
        # Parts and shards carry their own sha256 in a record; commits are signed with theirs.
        session = _session(config)
        self._bulk = _client(session, config, num_tries=NUM_BULK_TRIES, signed=False)
        self._single = _client(session, config, num_tries=1, signed=True)

    @property
    def uri(self) -> str:
        """See `ObjectStore.uri`."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        return self._get(key)[0]

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """See `ObjectStore.get_with_etag`."""
        return self._get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        if length <= 0 or start >= self.size(key):
            return b""
        return self._get(key, Range=f"bytes={start}-{start + length - 1}")[0]

    def download(self, key: str, path: Path) -> None:
        """See `ObjectStore.download`."""
        with self._translated(key):
            found = self._bulk.head_object(**self._named(key))
        size, etag = int(found["ContentLength"]), str(found["ETag"])
        with path.open("wb") as file:
            descriptor = file.fileno()
            os.truncate(descriptor, size)

            def fetch(start: int) -> None:
                wanted = f"bytes={start}-{min(start + PART_BYTES, size) - 1}"
                # If-Match, so that parts of two objects are never mixed.
                os.pwrite(descriptor, self._get(key, Range=wanted, IfMatch=etag)[0], start)

            _in_parallel(fetch, range(0, size, PART_BYTES))

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        with self._translated(key):
            return int(self._bulk.head_object(**self._named(key))["ContentLength"])

    def put(self, key: str, payload: bytes) -> None:
        """See `ObjectStore.put`."""
        with self._translated(key, writing=True):
            self._bulk.put_object(**self._named(key), Body=payload)

    def upload(self, key: str, path: Path) -> None:
        """See `ObjectStore.upload`."""
        size = path.stat().st_size
        if size <= 2 * PART_BYTES:
            return self.put(key, path.read_bytes())
        with self._translated(key, writing=True):
            upload_id = str(self._bulk.create_multipart_upload(**self._named(key))["UploadId"])
        try:
            with self._translated(key, writing=True):
                self._send_parts(key, path, size=size, upload_id=upload_id)
        except BaseException:
            self._abort(key, upload_id)
            raise

    def put_if_absent(self, key: str, payload: bytes) -> str:
        """See `ObjectStore.put_if_absent`."""

        def settle(outcome: _Outcome, stored: tuple[bytes, str] | None) -> str | None:
            if stored is None:
                # A refusal with nothing there: the object was deleted, or is about to appear.
                return None
            if stored[0] != payload:
                raise AlreadyExists(
                    f"{key} exists in {self.uri} with other bytes. Expected no object. Read it."
                ) from outcome.error
            return stored[1]

        return self._put_once(key, payload, {"IfNoneMatch": "*"}, settle)

    def put_if_match(self, key: str, payload: bytes, etag: str) -> str:
        """See `ObjectStore.put_if_match`."""

        def settle(outcome: _Outcome, stored: tuple[bytes, str] | None) -> str | None:
            if stored is not None and stored[0] == payload:
                return stored[1]
            if outcome.kind == "lost" and stored is not None and stored[1] == etag:
                return None
            found = "nothing" if stored is None else f"etag {stored[1]}"
            raise CommitConflict(
                f"{key} in {self.uri} is no longer what was read: expected etag {etag}, found "
                f"{found}. Reload it."
            ) from outcome.error

        return self._put_once(key, payload, {"IfMatch": etag}, settle)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[Listed]:
        """See `ObjectStore.list`."""
        pages = self._pages(
            "list_objects_v2",
            Prefix=self._prefix + prefix,
            StartAfter=self._prefix + start_after if start_after else "",
        )
        for page in pages:
            for entry in page.get("Contents", []):
                # SeaweedFS takes a prefix for a path: it finds `a/x` under `a//` and `b/../a/`.
                if str(entry["Key"]).startswith(self._prefix + prefix):
                    key = str(entry["Key"]).removeprefix(self._prefix)
                    yield Listed(key=key, num_bytes=int(entry["Size"]))

    def folders(self, prefix: str) -> Sequence[str]:
        """See `ObjectStore.folders`."""
        whole = self._prefix + prefix
        return sorted(
            str(entry["Prefix"]).removeprefix(whole).rstrip("/")
            for page in self._pages("list_objects_v2", Prefix=whole, Delimiter="/")
            for entry in page.get("CommonPrefixes", [])
        )

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._translated(key):
            self._bulk.delete_object(**self._named(key))

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        """See `ObjectStore.sweep`: aborts open multipart uploads.

        Their age is taken by the server's own clock, ours may be wrong.
        """
        swept = 0
        for page in self._pages("list_multipart_uploads", Prefix=self._prefix + prefix):
            now = server_time(page) or datetime.now(UTC)
            for upload in page.get("Uploads", []):
                if (now - upload["Initiated"]).total_seconds() >= older_than_s:
                    self._abort(str(upload["Key"]).removeprefix(self._prefix), upload["UploadId"])
                    swept += 1
        return swept

    def _named(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _get(self, key: str, **options: str) -> tuple[bytes, str]:
        """A body can break off after the headers, where boto3 no longer retries: we do."""
        for remaining in reversed(range(NUM_BULK_TRIES)):
            with self._translated(key):
                answer = self._bulk.get_object(**self._named(key), **options)
                try:
                    return answer["Body"].read(), str(answer["ETag"])
                except (HTTPClientError, IncompleteReadError):
                    if not remaining:
                        raise
        raise AssertionError

    def _send_parts(self, key: str, path: Path, *, size: int, upload_id: str) -> None:
        named = self._named(key)
        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
        with path.open("rb") as file:
            descriptor = file.fileno()

            def send(start: int) -> dict[str, Any]:
                number = start // part_bytes + 1
                body = os.pread(descriptor, part_bytes, start)
                answer = self._bulk.upload_part(
                    **named, UploadId=upload_id, PartNumber=number, Body=body
                )
                return {"PartNumber": number, "ETag": answer["ETag"]}

            parts = _in_parallel(send, range(0, size, part_bytes))
        self._bulk.complete_multipart_upload(
            **named, UploadId=upload_id, MultipartUpload={"Parts": parts}
        )

    def _abort(self, key: str, upload_id: str) -> None:
        """Drops an upload as far as the store lets us; `sweep` drops the rest at a later start."""
        try:
            self._single.abort_multipart_upload(**self._named(key), UploadId=upload_id)
        except (ClientError, BotoCoreError):
            return

    def _put_once(
        self,
        key: str,
        payload: bytes,
        condition: dict[str, str],
        settle: Callable[[_Outcome, tuple[bytes, str] | None], str | None],
    ) -> str:
        """Sends a conditional put until it is known what became of it.

        `settle` looks at what is stored after a refusal or a lost answer: returns the etag if it
        is ours, raises if another's stands, returns None to try again.
        """
        was_lost = False
        outcome = _Outcome("again")
        for pause_s in PAUSES_S:
            time.sleep(pause_s)
            outcome = self._try_put(key, payload, condition)
            was_lost = was_lost or outcome.kind == "lost"
            if outcome.kind == "written":
                return outcome.etag
            if outcome.kind in ("never sent", "failed"):
                break
            if outcome.kind in ("refused", "lost"):
                etag = settle(outcome, self._read_back(key, outcome))
                if etag is not None:
                    return etag
        raise self._unsettled(key, outcome, was_lost=was_lost)

    def _try_put(self, key: str, payload: bytes, condition: dict[str, str]) -> _Outcome:
        try:
            answer = self._single.put_object(**self._named(key), Body=payload, **condition)
        except (ClientError, BotoCoreError) as error:
            kinds: dict[str, Any] = {
                REFUSED: "refused",
                TRY_AGAIN: "again",
                LOST: "lost",
                NEVER_SENT: "never sent",
            }
            return _Outcome(kinds.get(kind_of(error), "failed"), error=error)
        return _Outcome("written", etag=str(answer["ETag"]))

    def _read_back(self, key: str, outcome: _Outcome) -> tuple[bytes, str] | None:
        try:
            return self._get(key)
        except NotFound:
            return None
        except Unavailable as error:
            raise self._unknown(key) from (outcome.error or error)

    def _unsettled(self, key: str, outcome: _Outcome, *, was_lost: bool) -> StorageError:
        error = outcome.error
        if was_lost or error is None:
            unknown = self._unknown(key)
            unknown.__cause__ = error
            return unknown
        found = explain(error, self._config, key=key)
        found.__cause__ = error
        return found

    def _unknown(self, key: str) -> CommitUnknown:
        return CommitUnknown(
            f"The answer to a put of {key} in {self.uri} was lost, and reading it "
            "back did not settle whether it stands. Read it again before acting."
        )

    def _pages(self, operation: str, **options: str) -> Iterator[dict[str, Any]]:
        asked = {name: value for name, value in options.items() if value}
        pages = iter(self._bulk.get_paginator(operation).paginate(Bucket=self._bucket, **asked))
        while True:
            with self._translated(options["Prefix"]):
                page = next(pages, None)
            if page is None:
                return
            yield cast("dict[str, Any]", page)

    @contextmanager
    def _translated(self, key: str, *, writing: bool = False) -> Iterator[None]:
        """Turns boto3's exceptions into ours; `writing`: a lost answer may have taken effect."""
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            if writing and kind_of(error) in (LOST, TRY_AGAIN):
                raise self._unknown(key) from error
            raise explain(error, self._config, key=key) from error


_shared: dict[str, Any] = {}
"""The reader of botocore's descriptions of services, which keeps what it has parsed."""


def _session(config: StoreConfig) -> boto3.session.Session:
    """Returns a session of its own, so that credentials are looked for anew.

    Only the parsed description of S3 is shared: two thirds of the time of opening a store.
    """
    core = botocore.session.get_session()
    try:
        loader = _shared.setdefault("loader", core.get_component("data_loader"))
        core.register_component("data_loader", loader)
        return boto3.session.Session(botocore_session=core)
    except BotoCoreError as error:
        raise explain(error, config, key="") from error


def _client(
    session: boto3.session.Session, config: StoreConfig, *, num_tries: int, signed: bool
) -> Any:
    where: dict[str, Any] = {
        "endpoint_url": config.endpoint,
        "region_name": config.region or session.region_name or "us-east-1",
    }
    try:
        # Where it goes may be written in the environment or a profile: the client knows.
        custom = _is_custom(session.client("s3", **where))
    except (BotoCoreError, ValueError) as error:
        raise explain(error, config, key="") from error
    path_style = custom if config.path_style is None else config.path_style
    checksums = config.checksums or _default_checksums(custom)
    options = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S if num_tries > 1 else CONDITIONAL_READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": num_tries},
        max_pool_connections=NUM_CONNECTIONS,
        request_checksum_calculation=checksums,
        response_checksum_validation=checksums,
        s3={
            "addressing_style": "path" if path_style else "auto",
            "payload_signing_enabled": signed,
        },
    )
    return session.client("s3", **where, config=options)


def _is_custom(client: Any) -> bool:
    host = urlsplit(str(client.meta.endpoint_url)).hostname or ""
    return not host.endswith(AWS_DOMAINS)


def _default_checksums(custom: bool) -> str | None:
    """None leaves it to boto3's own setting, if the user made one."""
    if os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION"):
        return None
    return "when_required" if custom else "when_supported"


def _in_parallel(call: Callable[[int], _Returned], starts: range) -> list[_Returned]:
    """Runs `call` over `starts`, keeps order, and starts no more once one has failed."""
    with ThreadPoolExecutor(min(NUM_STREAMS, max(1, len(starts)))) as pool:
        try:
            return list(pool.map(call, starts))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
