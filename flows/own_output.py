"""Output of a flow run that a worker started: into its own file, not into the worker's pipe."""

import os
import sys
from pathlib import Path

from prefect.runtime import flow_run

from infra.home import home


def keep_output(name: str) -> Path | None:
    """Sends what this process prints to `logs/NAME/`, if a worker started it; returns the file.

    A worker reads its flow runs' output through pipes. When it is killed they break, and the next
    line of output would end the flow run with it (rich leaves with SystemExit, Prefect's console
    logging as well). In a file, output is also kept.
    """
    flow_run_id = flow_run.get_id()
    if flow_run_id is None or os.environ.get("PREFECT__FLOW_RUN_ID") != flow_run_id:
        return None
    file = home() / "logs" / name / f"flow-run-{flow_run_id}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    return file
