"""Where each stage's engine lives, as `placement` says: one place for all three kinds.

What a child is started with is the same whoever starts it: the run's own process, a service's
flow run or a stage's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tasks.reward.stage as reward_stage
from flows.config import RunConfig
from flows.known_environments import known_environment
from flows.limits import reward_here
from flows.per_step import PerStep
from flows.service_token import service_token
from flows.signing import KEY_VARIABLE
from flows.start_services import starter, wanted_services
from infra.home import engines_python, home
from storage.environment import changes
from storage.lease_watch import LeaseWatch
from storage.object_store import ObjectStore
from storage.records import RunRecord, canonical_json, sha256_hex
from storage.store_config import StoreConfig
from tasks.child_process import Face
from tasks.client import Child, ChildSpec, InProcess, StageClient
from tasks.errors import Permanent
from tasks.fleet import Address, Fleet, FleetSpec
from tasks.reward.contract import Progress
from tasks.reward.grading import start as start_grading
from tasks.rollout.contract import LoadRequest
from tasks.service_contract import Health
from tasks.workspace import Workspace

EngineStage = Literal["rollout", "train"]


@dataclass(frozen=True)
class Site:
    """What every placement of a run's engines needs to know."""

    record: RunRecord
    config: RunConfig
    store: ObjectStore
    store_config: StoreConfig
    workspace: Workspace
    say: Callable[[str], None]
    """Told what an engine is doing while a stage waits for it."""
    graded: Progress
    """Told how many samples have their reward, on whatever thread."""


@contextmanager
def placed(stage: EngineStage, site: Site) -> Iterator[StageClient]:
    """Yields the client of one stage; what was started for it alone ends with the block.

    Raises:
        ValueError: services need a token, and there is none.
    """
    where = getattr(site.config.placement, stage)
    if where == "local":
        spec = child_spec(stage, site.record, site.config, store=site.store_config)
        with Child(spec, workspace=site.workspace, say=site.say) as child:
            child.start()
            yield child
    elif where == "service":
        fleet = _fleet(stage, site)
        try:
            fleet.prepare()
            yield fleet
        finally:
            fleet.close()
    else:
        yield _per_step(stage, site)


@contextmanager
def reward_placed(site: Site) -> Iterator[StageClient]:
    """Yields the client of the reward stage; grading processes of this host end with the block."""
    if site.config.placement.reward == "per-step":
        yield _per_step("reward", site)
        return
    settings = reward_here(site.config.reward).model_dump(mode="json")
    with start_grading(
        settings, model_dir=Path(), workspace=site.workspace, progress=site.graded
    ) as grading:
        yield InProcess(reward_stage, store=site.store, engine=grading, workspace=site.workspace)


def _per_step(stage: str, site: Site) -> PerStep:
    return PerStep(
        stage,
        site.record,
        store=site.store,
        store_config=site.store_config,
        placement=site.config.placement,
        say=site.say,
    )


def child_spec(
    stage: EngineStage,
    record: RunRecord,
    config: RunConfig,
    *,
    store: StoreConfig,
    face: Face | None = None,
) -> ChildSpec:
    """Returns what a process is started with that serves a stage of the run."""
    settings = config.rollout if stage == "rollout" else config.train
    return ChildSpec(
        name=stage,
        stage=f"tasks.{stage}.stage",
        engine=f"tasks.{stage}.engine",
        config=settings.model_dump(mode="json"),
        model=record.model,
        store=store,
        home=home(),
        log_dir=home() / "logs" / record.run,
        python=settings.python or engines_python(),
        # Engines sign nothing, and run code of models.
        environment={KEY_VARIABLE: ""},
        face=face,
    )


def engine_digest(stage: EngineStage, record: RunRecord, config: RunConfig) -> str:
    """Returns what an engine is keyed by: it serves requests of the same digest and no others.

    Rollout engines are started with their limits; a trainer takes any config of its model.
    """
    fields = config.rollout.request_fields() if stage == "rollout" else {}
    key = {"stage": stage, "model": record.model.digest, "config": fields}
    return sha256_hex(canonical_json(key))


def service_role(stage: str, name: str = "") -> str:
    """Returns the lease role of a stage's service; without a name what all of them begin with."""
    return f"{stage}-service-{name}"


def check_environment(
    stage: str, found: dict[str, str], known: dict[str, str], *, allow: bool, run: str
) -> list[str]:
    """Returns how an engine's environment differs from that of the run's last steps, a line each.

    Code, Python and packages count, as far as both name them; another processor does not: nodes of
    a pool differ, and records say what made them.

    Raises:
        Permanent: it differs, and `allow` is False.
    """
    both = {name for name in found.keys() & known.keys() if _is_software(name)}
    differences = changes(
        {name: known[name] for name in both}, {name: found[name] for name in both}
    )
    if differences and not allow:
        raise Permanent(
            f"The {stage} engine of run {run!r} would run other libraries or code than the run's "
            f"last steps: {'; '.join(differences)}. Expected the same. Update that worker, or set "
            "placement.allow_other_environment=true: records say what made them."
        )
    return differences


def _is_software(name: str) -> bool:
    return name in ("python", "implementation", "code") or name.startswith("package:")


def _fleet(stage: EngineStage, site: Site) -> Fleet:
    run, placement = site.record.run, site.config.placement
    watch = LeaseWatch(site.store, run, service_role(stage))
    wanted = engine_digest(stage, site.record, site.config)
    known = known_environment(site.store, run, stage)
    said: set[str] = set()

    def find() -> Sequence[Address]:
        return [
            Address(f"{state.role}@{state.holder['address']}", str(state.holder["address"]))
            for state in watch.living()
            if state.holder.get("engine_digest") == wanted
        ]

    def check(health: Health) -> None:
        allow = placement.allow_other_environment
        for line in check_environment(stage, health.environment, known, allow=allow, run=run):
            if line not in said:
                said.add(line)
                site.say(f"a {stage} service runs in another environment: {line}")

    spec = FleetSpec(
        stage=stage,
        find=find,
        check=check,
        start_more=starter(stage, site.record, placement, store=site.store_config, say=site.say),
        wanted=wanted_services(stage, placement),
        everywhere=(LoadRequest,),
        wait_s=placement.wait_s,
        stall_s=placement.stall_s,
    )
    return Fleet(spec, token=service_token(), say=site.say)
