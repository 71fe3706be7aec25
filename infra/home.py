"""Where the product keeps what belongs to this host: caches, logs, scratch, local services.

Standard library only: preflight and install run before anything is downloaded.
"""

import os
from pathlib import Path


def checkout() -> "Path | None":
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
