"""What botocore's exceptions mean for a store: a class to act on, and words for a person."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, cast

from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    SSLError,
)

from storage.errors import BucketMissing, NotFound, StorageError, Unavailable, Unsuitable
from storage.store_config import StoreConfig

REFUSED = "refused"
"""The condition did not hold."""
TRY_AGAIN = "try again"
"""Nothing was written; the same request may succeed."""
LOST = "lost"
"""It may or may not have been written."""
NEVER_SENT = "never sent"
FAILED = "failed"

_NEVER_SENT = (EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError, SSLError)
_NO_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    ProfileNotFound,
)
_BAD_KEYS = {
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "UnauthorizedAccess",
}
MAX_SKEW = timedelta(minutes=15)
"""S3 refuses requests that are further from its own clock."""
_FULL = {"507", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "EntityTooLarge"}
_NOT_OURS = {"BucketAlreadyExists"}


def code_of(error: Exception) -> tuple[str, int]:
    """Returns the S3 error code and the HTTP status; empty and 0 if there was no answer."""
    if not isinstance(error, ClientError):
        return "", 0
    answer = cast("dict[str, Any]", error.response)
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return str(answer.get("Error", {}).get("Code", "")), status


def kind_of(error: Exception) -> str:
    """Returns which of the classes above a failed write falls into."""
    code, status = code_of(error)
    # 404 is the answer to If-Match where the object is gone.
    if status == 412 or code in ("PreconditionFailed", "NoSuchKey"):
        return REFUSED
    if status in (409, 429) or code in ("SlowDown", "OperationAborted"):
        return TRY_AGAIN
    if isinstance(error, _NEVER_SENT):
        return NEVER_SENT
    if isinstance(error, HTTPClientError) or (status >= 500 and status not in (501, 507)):
        return LOST
    return FAILED


def server_time(answer: Mapping[str, Any]) -> datetime | None:
    """Returns the time on the server's clock when it answered, or None if it did not say."""
    sent = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(sent) if sent else None


def _clock_is_off(error: Exception) -> bool:
    """Whether the clocks differ too much: an answer to HEAD has no body that could say so."""
    there = server_time(cast("ClientError", error).response)
    return there is not None and abs(datetime.now(UTC) - there) > MAX_SKEW


def must_create(error: Exception) -> bool:
    """Whether a failed creation of a bucket left us without it."""
    return code_of(error)[0] != "BucketAlreadyOwnedByYou"


def explain(error: Exception, config: StoreConfig, *, key: str) -> StorageError:
    """Returns the error to raise: what happened, what was expected, what to do."""
    where = f"{config.uri} at {config.endpoint}" if config.endpoint else config.uri
    code, status = code_of(error)
    if code == "NoSuchBucket":
        return BucketMissing(
            f"There is no bucket {config.bucket!r} ({where}). Expected one to be there: name "
            "another store, or let `rollbook launch --create-bucket` make it."
        )
    if code == "NoSuchKey" or status == 404:
        return NotFound(f"No object {key} in {where}.")
    if code == "RequestTimeTooSkewed" or (status in (401, 403) and _clock_is_off(error)):
        return Unavailable(
            f"{where} refuses requests because this machine's clock is off by more than 15 "
            "minutes. Set the clock (NTP) and resume."
        )
    if code in _NOT_OURS:
        return Unavailable(
            f"Bucket {config.bucket!r} belongs to another account. Choose another name."
        )
    if code in _BAD_KEYS:
        return Unavailable(
            f"{where} refuses the credentials ({code}). Expected keys that may read and "
            "write there: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
        )
    if status in (401, 403):
        denied = cast("ClientError", error).operation_name
        return Unavailable(
            f"{where} denies {denied} of {key or 'the bucket'} ({code or status}). Expected a "
            "bucket and keys that allow reading and writing: check its policy, AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
        )
    if isinstance(error, _NO_CREDENTIALS):
        return Unavailable(
            f"No credentials for {where}: {error} Set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
        )
    return _explain_answer(error, where, code=code, status=status, key=key)


def _explain_answer(
    error: Exception, where: str, *, code: str, status: int, key: str
) -> StorageError:
    if code in _FULL or status == 507:
        return Unavailable(f"{where} has no room for {key} ({code}). Free space, then resume.")
    if status == 501:
        return Unsuitable(
            f"{where} does not know a request that we need ({code}): conditional puts are "
            "expected. Use a store that has them, such as AWS S3, MinIO or SeaweedFS."
        )
    if isinstance(error, _NEVER_SENT):
        return Unavailable(
            f"{where} cannot be reached ({type(error).__name__}). Is the server up and the "
            "endpoint right? Nothing was written; resume when it answers."
        )
    if status:
        return Unavailable(
            f"{where} answered {status} {code} for {key or 'the bucket'}. Expected success: look "
            "at the server's log, then resume."
        )
    return Unavailable(f"{where} failed for {key or 'the bucket'}: {error}")
