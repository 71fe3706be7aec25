"""Goes on after a store, Prefect's server, or whatever else was away for a while, is back."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import httpx

from storage.errors import CommitUnknown, Unavailable
from tasks.errors import Transient

log = logging.getLogger(__name__)

T = TypeVar("T")

OUTAGE_LIMIT_S = 1800.0
"""How long it may be away; after that the flow run fails, and a later one goes on."""
MAX_IN_VAIN = 3
"""Failures in a row without a commit between them, after which it is no outage."""
_LOOK_EVERY_S = 2.0
_TRY_AGAIN = (408, 429)
# Services are asked through `tasks.client`, which has errors of its own: what httpx raises here is
# Prefect's client, after it tried again for a minute.
_MAY_PASS = (Transient, Unavailable, CommitUnknown, httpx.TransportError, httpx.HTTPStatusError)


def through_outages(
    advance: Callable[[], T],
    *,
    head_step: Callable[[], int],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Returns what `advance` returns, called again where it failed for something that passes.

    Args:
        advance: goes on from the last commit; redoes only what has no record.
        head_step: the newest committed step; its answer shows that the store is back, and Prefect.
        sleep: waits.
        clock: seconds, for how long it is away.

    Raises:
        Transient, Unavailable, CommitUnknown, httpx.HTTPError: three times in a row without a
            commit, or what is away stays away.
    """
    reached, in_vain = _once_back(head_step, sleep, clock), 0
    while True:
        try:
            return advance()
        except _MAY_PASS as error:
            if _is_refusal(error):
                raise
            cause = (str(error) or type(error).__name__).partition("\n")[0]
            log.warning("interrupted, and goes on once store and Prefect answer: %s", cause)
            newest = _once_back(head_step, sleep, clock)
            in_vain = 0 if newest > reached else in_vain + 1
            reached = newest
            if in_vain == MAX_IN_VAIN:
                raise
            log.info("going on from step %d", newest)


def _once_back(
    head_step: Callable[[], int], sleep: Callable[[float], None], clock: Callable[[], float]
) -> int:
    """Waits until all answers; returns the newest committed step.

    Raises:
        Unavailable, CommitUnknown, httpx.HTTPError: it stays away.
    """
    deadline = clock() + OUTAGE_LIMIT_S
    while True:
        try:
            return head_step()
        except _MAY_PASS as error:
            if clock() > deadline or _is_refusal(error):
                raise
            sleep(_LOOK_EVERY_S)


def _is_refusal(error: Exception) -> bool:
    """Whether a server that is there says no: asking again would be told the same."""
    if not isinstance(error, httpx.HTTPStatusError):
        return False
    status = error.response.status_code
    return status < 500 and status not in _TRY_AGAIN
