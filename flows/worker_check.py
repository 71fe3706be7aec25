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
    "stages = {name: importlib.import_module(f'tasks.{name}.stage') for name in sys.argv[1:]}; "
    "print(json.dumps({n: environment.describe(s.PACKAGES) for n, s in stages.items()}))"
)
_LIMIT_S = 120.0


def check_worker(store: ObjectStore, run: str, config: RunConfig) -> None:
    """Checks what this worker would run the stages with, before any engine starts.

    Raises:
        Permanent: other libraries or code than the run's last steps, and the run does not allow
            it; or an interpreter that cannot be asked.
    """
    placement = config.placement
    known: dict[str, dict[str, str]] = {}
    stages_of: dict[str, list[str]] = {}
    for stage, where, python in (
        ("rollout", placement.rollout, config.rollout.python),
        ("train", placement.train, config.train.python),
    ):
        environment = known_environment(store, run, stage) if where == "local" else {}
        if environment:
            known[stage] = environment
            stages_of.setdefault(python or engines_python(), []).append(stage)
    for python, stages in stages_of.items():
        for stage, found in _described(stages, python).items():
            allow = placement.allow_other_environment
            for line in check_environment(stage, found, known[stage], allow=allow, run=run):
                log.warning("another environment, recorded: %s", line)


def _described(stages: list[str], python: str) -> dict[str, dict[str, str]]:
    """Returns what an interpreter would run stages with, by stage; one start of it costs a second.

    Raises:
        Permanent: it cannot be asked.
    """
    asked = [python, "-c", _DESCRIBE, *stages]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or "").strip().splitlines()
        raise Permanent(
            f"The engines' interpreter {python} cannot be asked what it has: {error}. "
            f"{said[-1] if said else ''} Run `make install` on this worker."
        ) from error
    return json.loads(done.stdout)
