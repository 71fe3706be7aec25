"""The two kinds of failure of a stage; retries look at the class and nothing else."""

from typing import Any

from storage.errors import CommitUnknown, StorageError, Unavailable
from tasks.workspace import Workspace, full_disk

_CURED_BY_A_RETRY = (Unavailable, CommitUnknown, ConnectionError, TimeoutError)


class Transient(Exception):
    """A retry of the same request may succeed: a child died, a connection broke, a put was lost."""


class Permanent(Exception):
    """A retry of the same request fails the same way: bad input, corrupt object, NaN."""


def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Tells Prefect whether to retry a task run: its `retry_condition_fn`, in every `task.py`."""
    return isinstance(state.result(raise_on_failure=False), Transient)


def attributed(error: Exception, *, workspace: Workspace | None = None) -> Transient | Permanent:
    """Returns `error` as the one of the two classes that it belongs to.

    The one boundary where errors of a stage are sorted: a store that was out of reach or whose
    answer was lost is worth a retry, everything else fails the same way again. The message opens
    with the original class, and the original is the cause. If a disk was full, it also says which
    places of `workspace` may have been meant; errors of the store name their own.
    """
    ours = isinstance(error, Transient | Permanent)
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    hint = ""
    if workspace is not None and not isinstance(error, StorageError):
        hint = full_disk(workspace, text)
    if ours and not hint:
        return error
    kind = Transient if isinstance(error, (Transient, *_CURED_BY_A_RETRY)) else Permanent
    sorted_error = kind(_with_hint(text, hint))
    sorted_error.__cause__ = error
    return sorted_error


def _with_hint(text: str, hint: str) -> str:
    """Puts `hint` behind the first line: the cause, which details of a log may follow."""
    if not hint:
        return text
    cause, *details = text.splitlines()
    return "\n".join([f"{cause.rstrip('.')}. {hint}", *details])
