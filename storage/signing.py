"""Who vouches for a commit: ed25519 keys in PEM files, and signatures inside commit.json.

A signature proves who committed; that the commit is part of a chain is the ledger's business.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from storage.records import Signature, StepCommit, canonical_json, why_invalid

Signer = Ed25519PrivateKey
PublicKey = Ed25519PublicKey

FIELD = "signature"
"""The one field of a commit that its signature does not cover."""


@dataclass(frozen=True)
class SignatureCheck:
    """What a commit's signature is worth to whoever holds, or lacks, a key.

    `good`: by the key that was asked for. `self-asserted`: by the key that it names itself, and
    none was asked for. `other key`: whole, but by another key. `missing`: unsigned. `bad`: the
    bytes are not what was signed, or not the one encoding of it; then `reason` says which.
    """

    verdict: Literal["good", "self-asserted", "other key", "missing", "bad"]
    public_key: str | None = None
    """Hex; the key that the signature names, if there is one."""
    reason: str | None = None


def new_key(path: Path) -> Path:
    """Makes a key: the private PEM at `path` (mode 0600), the public one beside it.

    Returns:
        Where the public key lies: `path` with `.pub` after it.

    Raises:
        ValueError: one of the two files is there; a key is never written over.
        OSError: the folder cannot be made or written.
    """
    public = public_path(path)
    for taken in (path, public):
        if taken.exists():
            raise ValueError(
                f"{taken} exists. Expected no file there, because a key that was written over is "
                "lost. Name another file: `rollbook keys new FILE`."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate()
    _create(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _create(public, pem, mode=0o644)
    return public


def public_path(path: Path) -> Path:
    """Where the public half of the private key at `path` lies."""
    return path.with_name(f"{path.name}.pub")


def load_signer(path: Path) -> Signer:
    """Returns the private key in the PEM file at `path`.

    Raises:
        ValueError: the file cannot be read, or holds no unencrypted ed25519 private key.
    """
    pem = _read(path)
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(
            f"{path} holds no usable private key. Expected an unencrypted ed25519 key in PEM, as "
            "`rollbook keys new` writes it. Name that file (not its .pub)."
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(
            f"{path} holds a private key of another kind. Expected ed25519: make one with "
            "`rollbook keys new`."
        )
    return key


def load_public_key(path: Path) -> PublicKey:
    """Returns the public key in the PEM file at `path`.

    Raises:
        ValueError: the file cannot be read, or holds no ed25519 public key.
    """
    pem = _read(path)
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(
            f"{path} holds no public key. Expected an ed25519 public key in PEM, as "
            "`rollbook keys new` writes it: the file that ends in .pub."
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"{path} holds a public key of another kind. Expected ed25519.")
    return key


def public_hex(key: Signer | PublicKey) -> str:
    """Returns a public key as signatures name it: 64 hex digits."""
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def sign_commit(commit: StepCommit, signer: Signer) -> StepCommit:
    """Returns `commit` with the signature over its canonical bytes; another one is replaced."""
    body = commit.model_dump(mode="json")
    signature = Signature(
        public_key=public_hex(signer), signature=signer.sign(_signed_bytes(body)).hex()
    )
    return commit.model_copy(update={FIELD: signature})


def check_signature(payload: bytes, key: PublicKey | None) -> SignatureCheck:
    """Returns what the signature in a commit's stored bytes is worth.

    Bytes that are not the canonical encoding are `bad`, signed or not, so that nothing outside
    the signature can vary.

    Args:
        payload: the bytes of commit.json.
        key: whom the reader trusts; None trusts nobody, and a whole signature is `self-asserted`.
    """
    body = _canonical_body(payload)
    if body is None:
        return SignatureCheck("bad", reason="the bytes are not the canonical encoding of a commit")
    if body.get(FIELD) is None:
        return SignatureCheck("missing")
    try:
        found = Signature.model_validate(body[FIELD])
    except ValueError as error:
        return SignatureCheck("bad", reason=f"no signature record: {why_invalid(error)}")
    reason = _why_bad(found, body)
    if reason:
        return SignatureCheck("bad", found.public_key, reason)
    if key is None:
        return SignatureCheck("self-asserted", found.public_key)
    if public_hex(key) != found.public_key:
        return SignatureCheck("other key", found.public_key)
    return SignatureCheck("good", found.public_key)


def _canonical_body(payload: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) and canonical_json(body) == payload else None


def _why_bad(found: Signature, body: dict[str, Any]) -> str | None:
    if found.model_dump(mode="json") != body[FIELD]:
        return "the signature is not in its canonical form"
    key, signature = _from_hex(found.public_key), _from_hex(found.signature)
    if key is None or signature is None:
        return "key and signature are not lower-case hex"
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed_bytes(body))
    except ValueError:
        return f"{found.public_key} is no ed25519 public key"
    except InvalidSignature:
        return "the bytes of the commit are not those that were signed"
    return None


def _signed_bytes(body: dict[str, Any]) -> bytes:
    return canonical_json({name: value for name, value in body.items() if name != FIELD})


def _from_hex(text: str) -> bytes | None:
    """Returns the bytes, or None unless `text` is the one way to write them."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if found.hex() == text else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"The key file {path} cannot be read: {error.strerror}. Expected a PEM file: make a "
            "key with `rollbook keys new`, or name the right file."
        ) from error


def _create(path: Path, content: bytes, *, mode: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
