"""What the process of a flow run does first where a worker started it."""

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled

from infra.home import home

log = logging.getLogger(__name__)

DEAF_AFTER_S = 45.0
"""A worker that hears of a cancellation has ended the process by then: it looks at least every 10 s
and kills after 30 s."""
_GRACE_S = 30.0
_LOOK_EVERY_S = 5.0
_OWN_END = "Ended by its own process: its worker is gone, or hears of cancellations no more."


def begin(run: str) -> Path | None:
    """Makes this process fit to outlive its worker; returns the file that its output goes to.

    Does nothing and returns None where no worker started it.
    """
    context = FlowRunContext.get()
    ours = context.flow_run if context else None
    if ours is None or os.environ.get("PREFECT__FLOW_RUN_ID") != str(ours.id):
        return None
    file = _keep_output(run, str(ours.id))
    watch = threading.Thread(
        target=copy_context().run, args=(_heed_cancellation, ours), daemon=True
    )
    watch.start()
    return file


def _keep_output(name: str, flow_run_id: str) -> Path:
    """Sends what this process prints to a file in `logs/NAME/`, not into the worker's pipe.

    A worker reads its flow runs' output through pipes. When it is killed they break, and the next
    line of output would end the flow run with it (rich leaves with SystemExit, Prefect's console
    logging as well). In a file, output is also kept.
    """
    file = home() / "logs" / name / f"flow-run-{flow_run_id}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    return file


def _heed_cancellation(ours: FlowRun) -> None:
    """Ends this process as its worker would, where the flow run is cancelled and no worker does.

    A worker may be dead, and one whose server was away for half a minute looks for cancellations
    no more (Prefect 3.9.1). A step that it is in ends as crashed, the flow run as cancelled.
    """
    since: float | None = None
    ask_once: dict[Any, Any] = {PREFECT_CLIENT_MAX_RETRIES: 0}
    with temporary_settings(ask_once), get_client(sync_client=True) as client:
        while True:
            time.sleep(_LOOK_EVERY_S)
            # While the server is away nothing can be known.
            with suppress(httpx.HTTPError, ObjectNotFound):
                state = client.read_flow_run(ours.id).state
                # The latter too: the answer to what this sets may be lost.
                cancelling = state and (state.is_cancelling() or state.is_cancelled())
                since = (since or time.monotonic()) if cancelling else None
                if since and time.monotonic() - since > DEAF_AFTER_S:
                    log.warning("cancelled, and no worker ends this process; it ends itself")
                    client.set_flow_run_state(ours.id, Cancelled(message=_OWN_END))
                    # The engine reports a crash, unless it knows of an end.
                    ours.state = Cancelled(message=_OWN_END)
                    break
    os.kill(os.getpid(), signal.SIGTERM)
    # This thread is gone with the process, unless that hangs.
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
