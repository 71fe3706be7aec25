"""Asks one service over HTTP, patiently: retries, rate limit, and an end to every wait.

Model endpoints and sandbox services are asked alike. What is asked and what an answer means is the
caller's.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx
import tenacity

from rewards.contract import Refused
from tasks.reward.wire import Wire

Read = TypeVar("Read")

_RETRIED = frozenset({408, 409, 425, 429})
"""Statuses below 500 that may pass."""
_REFUSALS: dict[int, type[OSError]] = {
    **dict.fromkeys((400, 413, 422), Refused),
    **dict.fromkeys((401, 403), PermissionError),
}
"""What is wrong with one request, and what is wrong with whoever asks."""
_QUOTED_CHARACTERS = 200
_MAX_ANSWER_BYTES = 16 << 20
_BACKOFF = tenacity.wait_exponential_jitter(multiplier=0.1, max=10.0, jitter=0.1)


class MayPass(Exception):
    """An attempt failed in a way that another may not."""

    def __init__(self, words: str, *, wait_s: float = 0.0) -> None:
        super().__init__(words)
        self.wait_s = wait_s
        """What the service asks to wait for."""


@dataclass(frozen=True)
class Manners:
    """How hard a service may be asked: requests in flight, and how long one is tried again."""

    concurrency: int
    patience_s: float
    requests_per_minute: int | None = None
    """Over all threads; None: no limit."""


class PatientService:
    """A service that answers JSON; use from any thread.

    One that has been away for `patience_s` is tried once per request from then on, so that a step
    does not wait so long for each of its samples.

    Args:
        url: of the service, without a path.
        token: bearer token, if it wants one.
        manners: how hard it may be asked.
        trust_env: whether proxies of the environment are used.
        death: says how a service that was started here ended, or None.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        manners: Manners,
        trust_env: bool = True,
        death: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._patience_s = manners.patience_s
        self._death = death
        self._pace = _Pace(manners.requests_per_minute)
        self._closed = threading.Event()
        self._answered_at = time.monotonic()
        self._given_up = False
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._wire = Wire(
            self.url,
            headers=headers,
            max_connections=manners.concurrency,
            max_bytes=_MAX_ANSWER_BYTES,
            trust_env=trust_env,
        )

    def ask(
        self,
        method: str,
        path: str,
        payload: bytes | None,
        *,
        timeout_s: float,
        read: Callable[[Any], Read],
    ) -> Read:
        """Returns what `read` makes of the parsed answer.

        Args:
            method: of HTTP.
            path: begins with a slash.
            payload: JSON, or nothing.
            timeout_s: for one attempt.
            read: raises `MayPass` for an answer that another attempt may better.

        Raises:
            Refused: the service refuses this request, and would again.
            PermissionError: it refuses whoever asks.
            OSError: no answer came, after all retries, or `close` was called.
        """
        begun = time.monotonic()
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(MayPass),
            wait=_wait_s,
            stop=self._gives_up,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return retrying(lambda: read(self._attempt(method, path, payload, timeout_s)))
        except MayPass as error:
            # Unless others were answered meanwhile: then it was this request.
            self._given_up = self._answered_at < begun
            tried = retrying.statistics.get("attempt_number", 1)
            raise OSError(
                f"{self.url}{path} gave no answer: {error}. Tried {tried} times in "
                f"{time.monotonic() - begun:.0f} s. Expected an answer within patience_s = "
                f"{self._patience_s:g}: see to the service, or raise it."
            ) from error

    def close(self) -> None:
        """Ends every wait: requests that wait or are under way fail. Safe to call twice."""
        self._closed.set()
        self._wire.close()

    def _sleep(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _gives_up(self, state: tenacity.RetryCallState) -> bool:
        assert state.seconds_since_start is not None
        waits_until_s = state.seconds_since_start + state.upcoming_sleep
        return self._given_up or waits_until_s > self._patience_s

    def _attempt(self, method: str, path: str, payload: bytes | None, timeout_s: float) -> Any:
        where = f"{self.url}{path}"
        self._pace.wait(self._closed)
        if self._closed.is_set():
            raise OSError(f"{where} was not asked: this grader is closed.")
        try:
            status, headers, content = self._wire.exchange(
                method, path, payload, timeout_s=timeout_s
            )
        except httpx.RequestError as error:
            if death := self._death():
                raise OSError(f"{death}\nIt served {self.url} for this grader.") from error
            raise MayPass(f"{type(error).__name__}: {error}") from error
        except ConnectionAbortedError as error:
            raise OSError(f"{where} gave no answer: this grader is closed.") from error
        if status in _RETRIED or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise MayPass(self._said(status, content), wait_s=_retry_after_s(headers))
        self._answered_at = time.monotonic()
        self._given_up = False
        if not httpx.codes.is_success(status):
            kind = _REFUSALS.get(status, OSError)
            raise kind(f"{where} refused the request: {self._said(status, content)}")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise MayPass(f"its answer is not JSON: {self._said(status, content)}") from error

    def _said(self, status: int, content: bytes) -> str:
        """Returns the first words of an answer; a token that it repeats is left out."""
        text = " ".join(content[: 4 * _QUOTED_CHARACTERS].decode("utf-8", "replace").split())
        if self._token:
            text = text.replace(self._token, "***")
        return f"status {status}: {text[:_QUOTED_CHARACTERS] or '(empty)'}"


def bearer_token(variable: str | None) -> str | None:
    """Returns the token that an environment variable holds; None if none is named.

    Raises:
        ValueError: it is not set, or holds no token; the message names it.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(
            f"The environment variable {variable} (api_key_env) is not set. Expected the "
            "service's bearer token in it, where the graders run."
        )
    if not token.isascii() or not token.isprintable():
        raise ValueError(
            f"The environment variable {variable} (api_key_env) holds characters that no bearer "
            "token has. Set it again."
        )
    return token


class _Pace:
    """Hands out moments to send at, evenly, so many per minute over all threads."""

    def __init__(self, per_minute: int | None) -> None:
        self._interval_s = 60.0 / per_minute if per_minute else 0.0
        self._lock = threading.Lock()
        self._next = time.monotonic()

    def wait(self, closed: threading.Event) -> None:
        """Returns when the next request may be sent, or when `closed` is set."""
        if not self._interval_s:
            return
        with self._lock:
            now = time.monotonic()
            moment = max(now, self._next)
            self._next = moment + self._interval_s
        closed.wait(moment - now)


def _wait_s(state: tenacity.RetryCallState) -> float:
    assert state.outcome is not None
    error = state.outcome.exception()
    asked = error.wait_s if isinstance(error, MayPass) else 0.0
    return max(asked, _BACKOFF(state))


def _retry_after_s(headers: httpx.Headers) -> float:
    """Returns what Retry-After says, in seconds or as a date; 0 if it says nothing of use."""
    value = headers.get("Retry-After", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
