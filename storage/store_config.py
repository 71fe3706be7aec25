"""Where a store is and how to reach it: what a command line, a task or a child process passes on.

Credentials are never part of it; the S3 backend takes them from boto3's own chain.
"""

from pathlib import Path
from typing import Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import model_validator

from storage.records import Record

SCHEMES = ("s3", "file", "memory")


class StoreConfig(Record):
    """Address of a store; picklable, and the same as JSON."""

    uri: str
    """`s3://bucket/prefix`, a directory (path or `file:///dir`), or `memory://name`."""
    endpoint: str | None = None
    """S3 only: URL of a server that is not AWS."""
    region: str | None = None
    """S3 only; default: boto3's own, else `us-east-1`."""
    path_style: bool | None = None
    """S3 only: bucket in the path, not in the host name. Default: True for custom endpoints."""
    checksums: Literal["when_required", "when_supported"] | None = None
    """S3 only: boto3's own checksums. Default: `when_required` for custom endpoints, many of
    which refuse the newer headers; our sha256 guards every object anyway."""

    @model_validator(mode="after")
    def _known_scheme(self) -> Self:
        if self.scheme not in SCHEMES:
            raise ValueError(
                f"Store address {self.uri!r} has scheme {self.scheme!r}. Expected "
                "s3://bucket/prefix, a directory, or memory://name."
            )
        if not self.uri or (self.scheme == "s3" and not self.bucket):
            raise ValueError(f"Store address {self.uri!r} is not complete: s3://bucket/prefix.")
        return self

    @property
    def scheme(self) -> str:
        """`s3`, `file` or `memory`; a plain path is `file`."""
        head, mark, _ = self.uri.partition("://")
        return head if mark else "file"

    @property
    def bucket(self) -> str:
        """The bucket of an S3 address, or the name of a memory store."""
        return urlsplit(self.uri).netloc

    @property
    def prefix(self) -> str:
        """The key prefix within the bucket, without slashes at its ends."""
        return urlsplit(self.uri).path.strip("/")

    @property
    def directory(self) -> Path:
        """The absolute directory of a `file` address."""
        path = unquote(urlsplit(self.uri).path) if "://" in self.uri else self.uri
        return Path(path).expanduser().resolve()
