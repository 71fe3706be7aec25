"""What holds for every test, whoever started pytest and how."""

import signal

import pytest

SHARED = ("pools", "watched")
"""Session fixtures that are too dear to be made by more than one worker."""


def pytest_configure() -> None:
    """Makes Ctrl-C work: a shell starts background jobs without it, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps a file's tests in one worker, and with them other files of the same dear fixture."""
    groups: dict[str, str] = {}
    for item in items:
        file = str(item.path)
        groups.setdefault(file, file)
        for name in SHARED:
            if name in getattr(item, "fixturenames", ()):
                groups[file] = name
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[str(item.path)]))
