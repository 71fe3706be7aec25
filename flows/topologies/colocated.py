"""Everything on this machine: engines as child processes of the controller, started together."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import tasks.checkpoint.stage as checkpoint_stage
import tasks.prompts.stage as prompts_stage
import tasks.reward.stage as reward_stage
from flows.config import RunConfig
from flows.signing import KEY_VARIABLE, find_signer
from flows.topologies.stages import Stages
from infra.home import engines_python, home
from storage.object_store import ObjectStore
from storage.records import RunRecord
from storage.store_config import StoreConfig
from tasks.client import Child, ChildSpec, InProcess
from tasks.reward.pool import start as start_reward_pool
from tasks.workspace import Workspace


@contextmanager
def colocated(
    record: RunRecord,
    *,
    config: RunConfig,
    store: ObjectStore,
    store_config: StoreConfig,
    workspace: Workspace,
    say: Callable[[str], None],
) -> Iterator[Stages]:
    """Yields the stages of a run; both engines start in the background and end with the block.

    `say` is told what an engine is doing while a stage waits for it.
    """
    signer = find_signer()
    logs = home() / "logs" / record.run

    def child(name: str, settings: dict[str, object], python: str | None) -> Child:
        spec = ChildSpec(
            name=name,
            stage=f"tasks.{name}.stage",
            engine=f"tasks.{name}.engine",
            config=settings,
            model=record.model,
            store=store_config,
            home=home(),
            log_dir=logs,
            python=python or engines_python(),
            # Engines sign nothing, and run code of models.
            environment={KEY_VARIABLE: ""},
        )
        return Child(spec, workspace=workspace, say=say)

    with ExitStack() as stack:
        rollout = stack.enter_context(
            child("rollout", config.rollout.model_dump(mode="json"), config.rollout.python)
        )
        train = stack.enter_context(
            child("train", config.train.model_dump(mode="json"), config.train.python)
        )
        rollout.start()
        train.start()
        pool = start_reward_pool(
            config.reward.model_dump(mode="json"), model_dir=Path(), workspace=workspace
        )
        stack.callback(pool.close)
        yield Stages(
            prompts=InProcess(prompts_stage, store=store, workspace=workspace),
            rollout=rollout,
            reward=InProcess(reward_stage, store=store, engine=pool, workspace=workspace),
            train=train,
            checkpoint=InProcess(checkpoint_stage, store=store, engine=signer, workspace=workspace),
        )
