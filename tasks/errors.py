"""The two kinds of failure of a stage; retries look at the class and nothing else."""

from typing import Any

from storage.errors import CommitUnknown, Unavailable

_CURED_BY_A_RETRY = (Unavailable, CommitUnknown, ConnectionError, TimeoutError)


class Transient(Exception):
    """A retry of the same request may succeed: a child died, a connection broke, a put was lost."""


class Permanent(Exception):
    """A retry of the same request fails the same way: bad input, corrupt object, NaN."""


def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Tells Prefect whether to retry a task run: its `retry_condition_fn`, in every `task.py`."""
    return isinstance(state.result(raise_on_failure=False), Transient)


def attributed(error: Exception) -> Transient | Permanent:
    """Returns `error` as the one of the two classes that it belongs to.

    The one boundary where errors of a stage are sorted: a store that was out of reach or whose
    answer was lost is worth a retry, everything else fails the same way again. The message opens
    with the original class, and the original is the cause.
    """
    if isinstance(error, Transient | Permanent):
        return error
    kind = Transient if isinstance(error, _CURED_BY_A_RETRY) else Permanent
    sorted_error = kind(f"{type(error).__name__}: {error}")
    sorted_error.__cause__ = error
    return sorted_error
