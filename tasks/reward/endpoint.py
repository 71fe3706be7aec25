"""Asks a service over HTTP for what graders want: retries, rate limit, cache.

The service runs somewhere, or is started here for a model directory. What is asked and what an
answer means is the grader's.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
import tenacity

from rewards.contract import EndpointConfig, Refused
from tasks.reward.answers import Answers
from tasks.reward.model_server import ModelServer, Serves, serve_model
from tasks.reward.wire import Wire
from tasks.workspace import Workspace

Read = TypeVar("Read")

_MODELS = "/v1/models"
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


class _MayPass(Exception):
    """An attempt failed in a way that another may not."""

    def __init__(self, words: str, *, wait_s: float = 0.0) -> None:
        super().__init__(words)
        self.wait_s = wait_s
        """What the service asks to wait for."""


class HttpEndpoint:
    """A service that answers JSON; use from any thread. Equal requests are sent once.

    A service that has been away for `patience_s` is tried once per request from then on, so that
    a step does not wait so long for each of its samples.

    Args:
        config: how it is asked.
        url: of the service, without a path.
        cache: directory of answers that outlive this object; None: none do.
        server: the one that was started for this object, if any; it ends with `close`.
    """

    def __init__(
        self,
        config: EndpointConfig,
        *,
        url: str,
        cache: Path | None,
        server: ModelServer | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._patience_s = config.patience_s
        self._server = server
        self._token = server.token if server else _token(config.api_key_env)
        self._known_model = server.model if server else config.model
        self._answers = Answers(cache)
        self._pace = _Pace(config.requests_per_minute)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._asked: dict[str, Future[Any]] = {}
        self._answered_at = time.monotonic()
        self._given_up = False
        self._wire = _wire(config, self._url, token=self._token, trust_env=server is None)

    def post(self, path: str, body: Mapping[str, Any], *, read: Callable[[Any], Read]) -> Read:
        """Returns what `read` makes of the answer; see `rewards.contract.Endpoint`."""
        model = self._model()
        key = _key(self._identity(model), path, body)
        payload = _canonical({"model": model, **body})

        def ask() -> Any:
            kept = self._answers.get(key)
            if kept is not None and _is_readable(kept, read):
                return kept
            answer = self._ask("POST", path, payload)
            read(answer)
            self._answers.put(key, answer)
            return answer

        return read(self._once(key, ask))

    def describe(self) -> dict[str, str]:
        """Returns what the answers depend on, for the environment of a record."""
        if self._server:
            name = self._server.name
            return {
                f"reward_model:{name}": self._server.digest,
                f"reward_model_files:{name}": self._server.files_digest,
                f"reward_model_server:{name}": f"vllm {self._server.version}",
            }
        try:
            model = self._model()
        except OSError:  # Its requests say so; a record of what was graded must not fail for it.
            return {f"reward_model:{self._url}": self._url}
        return {f"reward_model:{model}": f"{self._url} {model}"}

    def death(self) -> str | None:
        """Returns how the server that was started for this object ended, or None."""
        return self._server.death() if self._server else None

    def close(self) -> None:
        """Ends what was started; requests that wait or are under way fail. Safe to call twice."""
        self._closed.set()
        self._wire.close()
        if self._server:
            self._server.close()

    def _identity(self, model: str) -> str:
        """Returns whose answers these are: never another model's, also not one of the same name."""
        if self._server:
            return f"{self._server.digest} {self._server.files_digest} {self._server.version}"
        return f"{self._url} {model}"

    def _model(self) -> str:
        if self._known_model is None:
            listed = self._once(_MODELS, lambda: self._ask("GET", _MODELS, None))
            self._known_model = _first_model(listed, where=self._url + _MODELS)
        return self._known_model

    def _once(self, key: str, ask: Callable[[], Any]) -> Any:
        """Returns what `ask` does; threads that come meanwhile with the same key share it."""
        mine: Future[Any] = Future()
        with self._lock:
            under_way = self._asked.get(key)
            if under_way is None:
                self._asked[key] = mine
        if under_way is not None:
            return under_way.result()
        try:
            mine.set_result(ask())
        except BaseException as error:
            mine.set_exception(error)
        finally:
            with self._lock:
                del self._asked[key]
        return mine.result()

    def _ask(self, method: str, path: str, payload: bytes | None) -> Any:
        begun = time.monotonic()
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_MayPass),
            wait=_wait_s,
            stop=self._gives_up,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return retrying(self._attempt, method, path, payload)
        except _MayPass as error:
            # Unless others were answered meanwhile: then it was this request.
            self._given_up = self._answered_at < begun
            tried = retrying.statistics.get("attempt_number", 1)
            raise OSError(
                f"{self._url}{path} gave no answer: {error}. Tried {tried} times in "
                f"{time.monotonic() - begun:.0f} s. Expected an answer within patience_s = "
                f"{self._patience_s:g}: see to the service, or raise it."
            ) from error

    def _sleep(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _gives_up(self, state: tenacity.RetryCallState) -> bool:
        assert state.seconds_since_start is not None
        waits_until_s = state.seconds_since_start + state.upcoming_sleep
        return self._given_up or waits_until_s > self._patience_s

    def _attempt(self, method: str, path: str, payload: bytes | None) -> Any:
        self._pace.wait(self._closed)
        if self._closed.is_set():
            raise OSError(f"{self._url}{path} was not asked: this grader is closed.")
        try:
            status, headers, content = self._wire.exchange(method, path, payload)
        except httpx.RequestError as error:
            self._blame_death(error)
            raise _MayPass(f"{type(error).__name__}: {error}") from error
        except ConnectionAbortedError as error:
            raise OSError(f"{self._url}{path} gave no answer: this grader is closed.") from error
        if status in _RETRIED or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise _MayPass(self._said(status, content), wait_s=_retry_after_s(headers))
        self._answered_at = time.monotonic()
        self._given_up = False
        if not httpx.codes.is_success(status):
            kind = _REFUSALS.get(status, OSError)
            raise kind(f"{self._url}{path} refused the request: {self._said(status, content)}")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _MayPass(f"its answer is not JSON: {self._said(status, content)}") from error

    def _blame_death(self, error: Exception) -> None:
        if death := self.death():
            raise OSError(f"{death}\nIt served {self._url} for this grader.") from error

    def _said(self, status: int, content: bytes) -> str:
        """Returns the first words of an answer; a token that it repeats is left out."""
        text = " ".join(content[: 4 * _QUOTED_CHARACTERS].decode("utf-8", "replace").split())
        if self._token:
            text = text.replace(self._token, "***")
        return f"status {status}: {text[:_QUOTED_CHARACTERS] or '(empty)'}"


def open_endpoint(
    config: EndpointConfig,
    *,
    serves: Serves,
    python: str | None,
    workspace: Workspace,
    given_up: threading.Event | None = None,
) -> HttpEndpoint:
    """Returns the service of a scoring function, started first if `config.path` names a model.

    Args:
        config: of the scoring function.
        serves: how vLLM serves a model of `config.path`.
        python: interpreter of the engines' environment, for the same.
        workspace: answers are kept in its cache.
        given_up: set when nobody waits for the model's start any more.

    Raises:
        ValueError: the token's variable is not set, or there is no such model directory.
        Permanent: the model's server does not start.
    """
    cache = workspace.cache / "answers"
    if config.path is None:
        assert config.url is not None
        return HttpEndpoint(config, url=config.url, cache=cache)
    server = serve_model(
        Path(config.path),
        serves=serves,
        python=python,
        workspace=workspace,
        arguments=config.arguments,
        given_up=given_up,
    )
    return HttpEndpoint(config, url=server.url, cache=cache, server=server)


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


def _wire(config: EndpointConfig, url: str, *, token: str | None, trust_env: bool) -> Wire:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return Wire(
        url,
        headers=headers,
        timeout_s=config.request_timeout_s,
        max_connections=config.concurrency,
        max_bytes=_MAX_ANSWER_BYTES,
        trust_env=trust_env,
    )


def _token(variable: str | None) -> str | None:
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


def _canonical(body: Mapping[str, Any]) -> bytes:
    # ASCII: a lone surrogate of a text passes, for the service to judge.
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _key(identity: str, path: str, body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical({"of": identity, "path": path, "body": body})).hexdigest()


def _is_readable(kept: Any, read: Callable[[Any], Any]) -> bool:
    """Tells whether an answer that some reader accepted once is one for this reader too."""
    try:
        read(kept)
    except ValueError:
        return False
    return True


def _wait_s(state: tenacity.RetryCallState) -> float:
    assert state.outcome is not None
    error = state.outcome.exception()
    asked = error.wait_s if isinstance(error, _MayPass) else 0.0
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


def _first_model(listed: Any, *, where: str) -> str:
    try:
        model = listed["data"][0]["id"]
    except (IndexError, KeyError, TypeError):
        model = None
    if isinstance(model, str):
        return model
    raise OSError(f"{where} lists no model. Expected one: name the service's with `model`.")
