"""The bearer token that services and the controllers of their runs share."""

import os
from pathlib import Path

from prefect.blocks.system import Secret
from prefect.exceptions import ObjectNotFound

from infra.home import service_token_file

TOKEN_VARIABLE = "ROLLBOOK_SERVICE_TOKEN_FILE"
BLOCK = "rollbook-service-token"


def service_token() -> str:
    """Returns the token: of the file that the variable names, the Secret block, or this home.

    Raises:
        ValueError: there is none; says how to make one.
    """
    named = os.environ.get(TOKEN_VARIABLE)
    if named:
        return _read(Path(named).expanduser())
    try:
        # `load` is a coroutine where a loop runs; flows of ours are plain functions.
        return str(Secret.load(BLOCK, _sync=True).get())  # type: ignore[union-attr]
    except (ObjectNotFound, ValueError):
        pass
    if service_token_file().is_file():
        return _read(service_token_file())
    raise ValueError(
        f"There is no token for services. Expected a Prefect Secret block {BLOCK!r}, a file that "
        f"{TOKEN_VARIABLE} names, or {service_token_file()} (`make up PROFILE=pools` makes it)."
    )


def _read(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ValueError(f"The token of services cannot be read: {error}") from error
    if len(token) < 16:
        raise ValueError(f"The token in {path} is too short. Expected at least 16 characters.")
    return token
