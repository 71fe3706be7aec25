"""What ran a stage: versions and processor, apart from what was asked of it.

Never the host's name or an address: two equal machines are one environment.
"""

import functools
import hashlib
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from storage.records import canonical_json, sha256_hex

CODE_FOLDERS = ("storage", "tasks", "rewards")
"""The folders whose sources decide what a record says."""


def describe(packages: Iterable[str]) -> dict[str, str]:
    """Returns the environment: Python, platform, processor, our code, and those `packages`.

    A package that is not installed is named `absent`, so that installing it shows.
    """
    found = {
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "code": _code_digest(),
    }
    return found | {f"package:{name}": _version(name) for name in sorted(set(packages))}


def changes(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns what differs between two environments, a line each; empty if they are one."""
    names = sorted(set(was) | set(now))
    return [
        f"{name}: {was.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in names
        if was.get(name) != now.get(name)
    ]


def digest(environment: Mapping[str, str]) -> str:
    """Returns the environment digest that goes into records."""
    return sha256_hex(canonical_json(dict(environment)))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


@functools.cache
def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


@functools.cache
def _code_digest() -> str:
    root = Path(__file__).resolve().parent.parent
    sources = sorted(path for folder in CODE_FOLDERS for path in (root / folder).rglob("*.py"))
    hasher = hashlib.sha256()
    for path in sources:
        hasher.update(canonical_json([path.relative_to(root).as_posix(), path.stat().st_size]))
        hasher.update(path.read_bytes())
    return hasher.hexdigest()
