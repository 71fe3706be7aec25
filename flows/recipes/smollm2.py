"""Recipe: SmolLM2-135M-Instruct learns to name the first letter of a word, in 13 steps."""

from flows.config import EvalSuite, EvaluateConfig, RunConfig
from tasks.prompts.contract import DatasetConfig, PromptsConfig
from tasks.reward.contract import RewardConfig, RewardPart
from tasks.rollout.contract import RolloutConfig
from tasks.train.contract import ModelConfig, TrainConfig


def smollm2() -> RunConfig:
    """SmolLM2-135M-Instruct learns to name the first letter of a word."""
    return RunConfig(
        recipe="smollm2",
        model=ModelConfig(path="builtin:smollm2"),
        prompts=PromptsConfig(
            datasets=[DatasetConfig(kind="first_letter")], groups_per_step=8, system_prompt=""
        ),
        rollout=RolloutConfig(
            group_size=8,
            groups_per_shard=8,
            max_tokens=10,
            max_model_len=256,
            max_num_seqs=64,
            dtype="bfloat16",
            threads=2,
        ),
        reward=RewardConfig(
            parts=[
                RewardPart(kind="exact", accuracy=True, options={"marks": ["tag"]}),
                RewardPart(
                    kind="format", weight=0.2, options={"pattern": "<answer>[a-z]</answer>"}
                ),
            ],
            workers=1,
        ),
        train=TrainConfig(
            learning_rate=2e-5,
            micro_batch_tokens=2048,
            dtype="bfloat16",
            threads=2,
            snapshot_every=25,
        ),
        evaluate=EvaluateConfig(
            every=13,
            suites={"sampled": EvalSuite(), "greedy": EvalSuite(temperature=0)},
        ),
        steps=13,
    )
