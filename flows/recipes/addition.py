"""Recipe: a 0.8M-parameter Qwen2 learns two-digit addition, in minutes on one CPU core."""

from flows.config import EvalSuite, EvaluateConfig, RunConfig
from tasks.prompts.contract import DatasetConfig, PromptsConfig
from tasks.reward.contract import RewardConfig, RewardPart
from tasks.rollout.contract import RolloutConfig
from tasks.train.contract import ModelConfig, TrainConfig


def addition() -> RunConfig:
    """A 0.8M-parameter model learns two-digit addition, from 0.29 to 0.9."""
    return RunConfig(
        recipe="addition",
        model=ModelConfig(path="builtin:addition"),
        prompts=PromptsConfig(
            datasets=[DatasetConfig(kind="addition")], groups_per_step=64, template=False
        ),
        rollout=RolloutConfig(
            group_size=8,
            groups_per_shard=64,
            max_tokens=5,
            max_model_len=128,
            max_num_seqs=512,
            kv_cache_bytes=256 << 20,
        ),
        reward=RewardConfig(
            parts=[RewardPart(kind="exact", accuracy=True, options={"whole": True})], workers=1
        ),
        train=TrainConfig(
            learning_rate=8e-4,
            warmup_updates=10,
            schedule="linear",
            schedule_updates=250,
            schedule_floor=0.1,
            micro_batch_tokens=4096,
            snapshot_every=25,
        ),
        evaluate=EvaluateConfig(every=25, suites={"held_out": EvalSuite()}),
        steps=250,
    )
