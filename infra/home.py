"""Where the product keeps what belongs to this host: caches, logs, scratch, local services.

Standard library only: preflight and install run before anything is downloaded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def checkout() -> Path | None:
    """Returns the root of the checkout this module runs from, or None if it was installed."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() else None


def home() -> Path:
    """Returns the product's directory on this host (not created here).

    `ROLLBOOK_HOME` if set, else `.rollbook` in the checkout, else `~/.rollbook`.
    """
    chosen = os.environ.get("ROLLBOOK_HOME")
    if chosen:
        return Path(chosen).expanduser().resolve()
    root = checkout()
    return (root or Path.home()) / ".rollbook"


def engines_python() -> str:
    """Returns the interpreter of the engines' environment.

    `ROLLBOOK_ENGINES_PYTHON` if set, else the checkout's `.venv-engines`, else this interpreter:
    a single environment that holds everything.
    """
    root = checkout()
    beside = root / ".venv-engines" / "bin" / "python" if root else None
    found = str(beside) if beside and beside.exists() else sys.executable
    return os.environ.get("ROLLBOOK_ENGINES_PYTHON") or found


def service_token_file() -> Path:
    """Returns where this host keeps the token that services and controllers share."""
    return home() / "service-token"


def write_private(file: Path, text: str) -> None:
    """Puts `text` into a file that only its owner may read, at once or not at all."""
    draft = file.with_name(file.name + ".new")
    descriptor = os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    draft.replace(file)
