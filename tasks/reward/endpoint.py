"""What a grader is lent to ask a model: equal requests are sent once, and answers are kept.

The service runs somewhere, or is started here for a model directory. What is asked and what an
answer means is the grader's.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rewards.contract import EndpointConfig
from tasks.reward.answers import Answers
from tasks.reward.asking import Manners, PatientService, bearer_token
from tasks.reward.model_server import ModelServer, Serves, serve_model
from tasks.workspace import Workspace

Read = TypeVar("Read")

_MODELS = "/v1/models"


class HttpEndpoint:
    """A service that answers JSON; use from any thread. Equal requests are sent once.

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
        self._timeout_s = config.request_timeout_s
        self._server = server
        self._known_model = server.model if server else config.model
        self._answers = Answers(cache)
        self._lock = threading.Lock()
        self._asked: dict[str, Future[Any]] = {}
        self._service = PatientService(
            url,
            token=server.token if server else bearer_token(config.api_key_env),
            manners=Manners(config.concurrency, config.patience_s, config.requests_per_minute),
            trust_env=server is None,
            death=self.death,
        )

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
            return {f"reward_model:{self._service.url}": self._service.url}
        return {f"reward_model:{model}": f"{self._service.url} {model}"}

    def death(self) -> str | None:
        """Returns how the server that was started for this object ended, or None."""
        return self._server.death() if self._server else None

    def close(self) -> None:
        """Ends what was started; requests that wait or are under way fail. Safe to call twice."""
        self._service.close()
        if self._server:
            self._server.close()

    def _identity(self, model: str) -> str:
        """Returns whose answers these are: never another model's, also not one of the same name."""
        if self._server:
            return f"{self._server.digest} {self._server.files_digest} {self._server.version}"
        return f"{self._service.url} {model}"

    def _model(self) -> str:
        if self._known_model is None:
            listed = self._once(_MODELS, lambda: self._ask("GET", _MODELS, None))
            self._known_model = _first_model(listed, where=self._service.url + _MODELS)
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
        return self._service.ask(
            method, path, payload, timeout_s=self._timeout_s, read=lambda answer: answer
        )


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


def _first_model(listed: Any, *, where: str) -> str:
    try:
        model = listed["data"][0]["id"]
    except (IndexError, KeyError, TypeError):
        model = None
    if isinstance(model, str):
        return model
    raise OSError(f"{where} lists no model. Expected one: name the service's with `model`.")
