"""Stages in turn, one step after the other; engines where `placement` says, started together."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import tasks.checkpoint.stage as checkpoint_stage
import tasks.prompts.stage as prompts_stage
from flows.config import RunConfig
from flows.placement import Site, placed, reward_placed
from flows.signing import find_signer
from flows.topologies.stages import Stages
from storage.object_store import ObjectStore
from storage.records import RunRecord
from storage.store_config import StoreConfig
from tasks.client import InProcess
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
    """Yields the stages of a run; local engines start in the background and end with the block.

    `say` is told what an engine is doing while a stage waits for it.
    """
    signer = find_signer()
    site = Site(
        record=record,
        config=config,
        store=store,
        store_config=store_config,
        workspace=workspace,
        say=say,
    )
    with ExitStack() as stack:
        rollout = stack.enter_context(placed("rollout", site))
        train = stack.enter_context(placed("train", site))
        reward = stack.enter_context(reward_placed(site))
        yield Stages(
            prompts=InProcess(prompts_stage, store=store, workspace=workspace),
            rollout=rollout,
            reward=reward,
            train=train,
            checkpoint=InProcess(checkpoint_stage, store=store, engine=signer, workspace=workspace),
        )
