"""Placeholder."""

from typing import Any


def open_endpoint(config: Any, *, serves: str, python: str | None, workspace: Any) -> Any:
    raise ValueError("no endpoint yet")
