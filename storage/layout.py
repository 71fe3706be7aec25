"""Every key of the store, spelled here and nowhere else."""

import re
from typing import Annotated, Literal

from pydantic import Field

from storage.records import Record

GC_RECORD_STEPS = 100
"""One GcRecord names objects below at most so many steps, so that one stays small."""

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class StepScope(Record):
    """The keys of one training step."""

    kind: Literal["step"] = "step"
    run: str
    step: int

    @property
    def prefix(self) -> str:
        """Where everything of this step lies."""
        return f"runs/{self.run}/steps/{self.step:08d}"


class EvalScope(Record):
    """The keys of one evaluation of one committed policy version."""

    kind: Literal["eval"] = "eval"
    run: str
    version: int
    suite: str

    @property
    def prefix(self) -> str:
        """Where everything of this evaluation lies."""
        return f"runs/{self.run}/evals/{self.version:08d}/{self.suite}"


Scope = Annotated[StepScope | EvalScope, Field(discriminator="kind")]


def check_run_name(run: str) -> str:
    """Returns `run` if it can name a run.

    Raises:
        ValueError: it cannot; the message says what can.
    """
    if not RUN_NAME.fullmatch(run):
        raise ValueError(
            f"Run name {run!r} is not usable. Expected 1 to 64 letters, digits, '.', '_' or '-', "
            "starting with a letter or digit."
        )
    return run


def runs_prefix() -> str:
    """Where all runs lie."""
    return "runs/"


def run_prefix(run: str) -> str:
    """Where everything of a run lies."""
    return f"runs/{run}/"


def run_key(run: str) -> str:
    """The RunRecord."""
    return f"runs/{run}/run.json"


def steps_prefix(run: str) -> str:
    """Where all steps of a run lie."""
    return f"runs/{run}/steps/"


def evals_prefix(run: str) -> str:
    """Where all evaluations of a run lie."""
    return f"runs/{run}/evals/"


def plan_key(run: str, step: int, revision: int) -> str:
    """The Plan of a step."""
    return f"{StepScope(run=run, step=step).prefix}/plan-{revision:04d}.json"


def plans_prefix(run: str, step: int) -> str:
    """Where all revisions of a step's plan lie."""
    return f"{StepScope(run=run, step=step).prefix}/plan-"


def commit_key(run: str, step: int) -> str:
    """The StepCommit of a step."""
    return f"{StepScope(run=run, step=step).prefix}/commit.json"


def record_key(scope: StepScope | EvalScope, stage: str, request_digest: str) -> str:
    """A StageRecord; `stage` carries the shard number where there are several: `rollout-0003`."""
    return f"{scope.prefix}/stages/{stage}/{request_digest}.json"


def record_prefix(scope: StepScope | EvalScope, stage: str) -> str:
    """Where the records of one stage lie, one per request."""
    return f"{scope.prefix}/stages/{stage}/"


def attempt_key(scope: StepScope | EvalScope, attempt: str, name: str) -> str:
    """A data object of one attempt."""
    return f"{scope.prefix}/attempts/{attempt}/{name}"


def eval_key(scope: EvalScope) -> str:
    """The EvalRecord."""
    return f"{scope.prefix}/eval.json"


def is_eval_key(key: str) -> bool:
    """Tells whether `key` is an EvalRecord's."""
    return re.fullmatch(r"runs/[^/]+/evals/\d+/[^/]+/eval\.json", key) is not None


def gc_prefix(run: str) -> str:
    """Where everything lies that says what `gc` deleted."""
    return f"runs/{run}/gc/"


def gc_steps_prefix(run: str, step: int) -> str:
    """Where the GcRecords lie that may name objects below step `step`."""
    return f"runs/{run}/gc/{step - step % GC_RECORD_STEPS:08d}/"


def gc_key(run: str, step: int, digest: str) -> str:
    """A GcRecord of the steps around `step`; `digest` is the sha256 of its bytes."""
    return f"{gc_steps_prefix(run, step)}{digest}.json"


def leases_prefix(run: str) -> str:
    """Where all leases of a run lie."""
    return f"runs/{run}/leases/"


def lease_key(run: str, role: str) -> str:
    """Liveness of a controller or service of a run."""
    return f"{leases_prefix(run)}{role}.json"


def lease_role(key: str) -> str:
    """Returns the role whose lease `key` is."""
    return key.rpartition("/")[2].removesuffix(".json")


def input_key(digest: str, name: str) -> str:
    """A file of a content-addressed input."""
    return f"inputs/{digest}/{name}"


def probe_prefix() -> str:
    """Where the conditional-put probe writes its throw-away objects."""
    return "probes/"


def step_of_commit_key(key: str) -> int | None:
    """Returns the step whose commit `key` is, or None if it is something else."""
    match = re.fullmatch(r"runs/[^/]+/steps/(\d+)/commit\.json", key)
    return int(match.group(1)) if match else None


def request_digest_of_key(key: str) -> str:
    """Returns the request digest that the key of a StageRecord ends in."""
    return key.rpartition("/")[2].removesuffix(".json")


def plan_revision_of_key(key: str) -> int | None:
    """Returns the revision of the plan that `key` is, or None if it is something else."""
    match = re.fullmatch(r"runs/[^/]+/steps/\d+/plan-(\d+)\.json", key)
    return int(match.group(1)) if match else None


def run_of_key(key: str) -> str:
    """Returns the run that a key below `runs/` belongs to."""
    return key.split("/")[1]


def step_of_key(key: str) -> int:
    """Returns the step that a key below `steps/` belongs to."""
    return int(key.split("/")[3])


def is_below_a_step(key: str) -> bool:
    """Tells whether `key` lies below a step of a run, so that it has a `step_of_key`."""
    return re.fullmatch(r"runs/[^/]+/steps/\d+/.+", key) is not None


Part = Literal["commit", "plan", "record", "attempt", "eval"]

_STEP = r"runs/[^/]+/steps/(\d{8}|[1-9]\d{8,})"
_EVAL = r"runs/[^/]+/evals/(\d{8}|[1-9]\d{8,})/[^/]+"
_PARTS: dict[Part, re.Pattern[str]] = {
    "commit": re.compile(rf"{_STEP}/commit\.json"),
    "plan": re.compile(rf"{_STEP}/plan-(\d{{4}}|[1-9]\d{{4,}})\.json"),
    "record": re.compile(rf"({_STEP}|{_EVAL})/stages/[^/]+/[0-9a-f]{{64}}\.json"),
    "attempt": re.compile(rf"({_STEP}|{_EVAL})/attempts/[^/]+/.+"),
    "eval": re.compile(rf"{_EVAL}/eval\.json"),
}


def part_of_key(key: str) -> Part | None:
    """Returns what `key` is within its step or evaluation, None if nothing here spells it so."""
    return next((part for part, pattern in _PARTS.items() if pattern.fullmatch(key)), None)


def is_snapshot_key(key: str) -> bool:
    """Tells whether `key` is a snapshot's file, as the train stage names them."""
    return part_of_key(key) == "attempt" and key.split("/")[6] == "snapshot"


def is_snapshot_record_key(key: str) -> bool:
    """Tells whether `key` is the record of a snapshot that was made apart from a train stage."""
    return part_of_key(key) == "record" and key.split("/")[5] == "snapshot"
