"""Which key signs commits made on this host; its path goes into no record, log or report."""

import os
from pathlib import Path

from infra.home import home
from storage.records import StepCommit
from storage.signing import Signer, load_signer, new_key, public_hex

KEY_VARIABLE = "ROLLBOOK_SIGNING_KEY"


def default_key() -> Path:
    """Where a key lies that needs no variable to be found."""
    return home() / "keys" / "signing.pem"


def find_signer() -> Signer | None:
    """Returns the key to sign with: the variable's, else the default file's, else none.

    Raises:
        ValueError: the key that is there, or that the variable names, cannot be used.
    """
    named = os.environ.get(KEY_VARIABLE)
    if named:
        return load_signer(Path(named).expanduser())
    return load_signer(default_key()) if default_key().exists() else None


def signing_note(signer: Signer | None, newest: StepCommit | None) -> str | None:
    """Returns what a person should know before commits of a run change hands, or None."""
    before = newest.signature.public_key if newest and newest.signature else None
    now = public_hex(signer) if signer else None
    if newest is None or before == now:
        return None
    found = f"signed by key {before[:16]}" if before else "unsigned"
    if now is None:
        return (
            f"step {newest.step} is {found}, and here is no key: the next commits are unsigned "
            f"(set {KEY_VARIABLE} to that key's file if they should not be)"
        )
    return f"step {newest.step} is {found}; the next commits are signed by key {now[:16]}"


def make_key(path: Path | None) -> list[str]:
    """Makes a key at `path` (default: where runs find it by themselves); returns what to say.

    Raises:
        ValueError: a file is there already; nothing was written.
    """
    chosen = (path or default_key()).expanduser().absolute()
    public = new_key(chosen)
    found = "runs on this host sign with it from now on"
    if chosen != default_key().absolute():
        found = f"runs sign with it where {KEY_VARIABLE}={chosen} is set"
    return [
        f"private key: {chosen}",
        f"  {found}",
        "  keep it secret and keep a copy in a safe place: whoever has it signs as you, and it "
        "cannot be made again",
        f"public key: {public}",
        "  hand it to whoever checks your runs, by a way that they trust; they run",
        f"  rollbook verify RUN --key {public.name}",
    ]
