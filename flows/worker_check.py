"""Whether a worker may take a run on: its engines' libraries and code against the run's last steps.

For engines that the worker itself starts; services and per-step flow runs say it of themselves.
"""

import json
import logging
import subprocess

from flows.config import RunConfig
from flows.known_environments import known_environment
from flows.placement import check_environment
from infra.home import engines_python
from storage.object_store import ObjectStore
from tasks.errors import Permanent

log = logging.getLogger(__name__)

_DESCRIBE = (
    "import importlib, json, sys; from storage import environment; "
    "stage = importlib.import_module(f'tasks.{sys.argv[1]}.stage'); "
    "print(json.dumps(environment.describe(stage.PACKAGES)))"
)
_LIMIT_S = 120.0


def check_worker(store: ObjectStore, run: str, config: RunConfig) -> None:
    """Checks what this worker would run the stages with, before any engine starts.

    Raises:
        Permanent: other libraries or code than the run's last steps, and the run does not allow
            it; or an interpreter that cannot be asked.
    """
    placement = config.placement
    for stage, where, python in (
        ("rollout", placement.rollout, config.rollout.python),
        ("train", placement.train, config.train.python),
    ):
        known = known_environment(store, run, stage) if where == "local" else {}
        if not known:
            continue
        found = _described(stage, python or engines_python())
        allow = placement.allow_other_environment
        for line in check_environment(stage, found, known, allow=allow, run=run):
            log.warning("another environment, recorded: %s", line)


def _described(stage: str, python: str) -> dict[str, str]:
    asked = [python, "-c", _DESCRIBE, stage]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or "").strip().splitlines()
        raise Permanent(
            f"The {stage} engine's interpreter {python} cannot be asked what it has: {error}. "
            f"{said[-1] if said else ''} Run `make install` on this worker."
        ) from error
    return json.loads(done.stdout)
