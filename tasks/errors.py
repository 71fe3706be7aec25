"""The two kinds of failure of a stage; retries look at the class and nothing else."""

from typing import Any


class Transient(Exception):
    """A retry of the same request may succeed: a child died, a connection broke, a put was lost."""


class Permanent(Exception):
    """A retry of the same request fails the same way: bad input, corrupt object, NaN."""


def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Tells Prefect whether to retry a task run: its `retry_condition_fn`, in every `task.py`."""
    return isinstance(state.result(raise_on_failure=False), Transient)
