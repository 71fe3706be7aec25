"""Stages in turn, one step after the other; engines where `placement` says, started together."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import tasks.checkpoint.stage as checkpoint_stage
import tasks.prompts.stage as prompts_stage
from flows.placement import Site, placed, reward_placed
from flows.signing import find_signer
from flows.topologies.stages import Stages
from tasks.client import InProcess


@contextmanager
def colocated(site: Site) -> Iterator[Stages]:
    """Yields the stages of a run; local engines start in the background and end with the block."""
    signer, store, workspace = find_signer(), site.store, site.workspace
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
