"""What holds for every test, whoever started pytest and how."""

import signal


def pytest_configure() -> None:
    """Makes Ctrl-C work: a shell starts background jobs without it, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
