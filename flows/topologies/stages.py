"""The stages of a run as a topology has placed them."""

from dataclasses import dataclass

from tasks.client import StageClient


@dataclass(frozen=True)
class Stages:
    """Where each stage is called; engines may still be starting."""

    prompts: StageClient
    rollout: StageClient
    reward: StageClient
    train: StageClient
    checkpoint: StageClient
