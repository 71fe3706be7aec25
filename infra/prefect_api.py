"""Calls of a Prefect server's HTTP API, for whoever sets one up. Standard library only."""

import base64
import json
import os
import urllib.error
import urllib.request
from typing import Any

from infra.daemons import ServiceError

_PATIENCE_S = 30.0


def call(api_url: str, method: str, path: str, body: Any = None) -> Any:
    """Returns what the server answers to one request; None if it answers nothing.

    Args:
        api_url: what PREFECT_API_URL says.
        method: of HTTP.
        path: below it, such as `/work_pools/`.
        body: sent as JSON.

    Raises:
        ServiceError: it does not answer, or refuses; the message says which.
    """
    request = urllib.request.Request(
        api_url.rstrip("/") + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **_authorization()},
    )
    try:
        with _opener(api_url).open(request, timeout=_PATIENCE_S) as answer:
            payload = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            said = error.read().decode(errors="replace")[:1000]
        raise Refused(error.code, f"{method} {path} at {api_url}: {error.code} {said}") from error
    except OSError as error:
        raise ServiceError(
            f"The Prefect server at {api_url} does not answer: {error}. Start it (`make up`), or "
            "correct PREFECT_API_URL."
        ) from error
    return json.loads(payload) if payload else None


class Refused(ServiceError):
    """The server answered with an error; `status` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def find_deployment(api_url: str, name: str) -> dict[str, Any]:
    """Returns the deployment of that name: `FLOW/DEPLOYMENT`, or one word if both are the same.

    Raises:
        ServiceError: there is none.
    """
    flow, _, deployment = name.partition("/")
    try:
        found = call(api_url, "GET", f"/deployments/name/{flow}/{deployment or flow}")
    except Refused as error:
        if error.status != 404:
            raise
        raise ServiceError(
            f"There is no deployment {flow}/{deployment or flow} at {api_url}. Deploy first: "
            "`prefect --no-prompt deploy --all`."
        ) from error
    assert isinstance(found, dict), "a deployment is an object"
    return found


def _authorization() -> dict[str, str]:
    key, pair = os.environ.get("PREFECT_API_KEY"), os.environ.get("PREFECT_API_AUTH_STRING")
    if pair:
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {"Authorization": f"Bearer {key}"} if key else {}


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Returns an opener that asks no proxy for this host."""
    local = url.startswith(("http://127.0.0.1", "http://localhost"))
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
