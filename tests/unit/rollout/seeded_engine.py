"""A rollout engine without a model, for tests of the stage: its tokens follow from the seeds."""

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from storage.records import PolicyRef, Probe, SamplingPolicy, WeightProof
from tasks.errors import Permanent
from tasks.rollout.contract import (
    Completion,
    FinishedGroup,
    GivenCompletion,
    PromptGroup,
    RolloutConfig,
    max_new_tokens,
)

VOCABULARY = 8


class SeededEngine:
    """Samples uniformly; `arrival` orders the finished groups, as a continuous engine would."""

    def __init__(self, config: RolloutConfig, *, arrival: int = 1) -> None:
        self.config = config
        self.proof: WeightProof | None = None
        self.loads: list[int] = []
        self.scored = 0
        self._arrival = arrival

    @property
    def policy_digest(self) -> str | None:
        return self.proof.policy_digest if self.proof else None

    def environment(self) -> dict[str, str]:
        return {"device": "none"}

    def load(self, policy: PolicyRef, *, directory: Path, probe: Probe) -> WeightProof:
        assert list(directory.glob("*.safetensors"))
        self.loads.append(policy.version)
        self.proof = WeightProof(
            kind="exact",
            policy_version=policy.version,
            policy_digest=policy.digest,
            max_abs_diff=0.0,
            mean_abs_diff=0.0,
            tolerance=self.config.probe_tolerance,
            num_tokens=len(probe.token_ids[0]),
        )
        return self.proof

    def submit(
        self, groups: Sequence[PromptGroup], *, sampling: SamplingPolicy
    ) -> Iterator[FinishedGroup]:
        if self.proof is None:
            raise Permanent("no policy")
        return iter([self._finish(group, sampling) for group in groups[:: self._arrival]])

    def score(
        self, completions: Sequence[GivenCompletion], *, temperature: float
    ) -> list[list[float]]:
        if self.proof is None:
            raise Permanent("no policy")
        self.scored += len(completions)
        return [[_logprob(token) for token in one.token_ids] for one in completions]

    def _finish(self, group: PromptGroup, sampling: SamplingPolicy) -> FinishedGroup:
        room = max_new_tokens(group, sampling, config=self.config)
        return FinishedGroup(
            group,
            [_draw(group.seed + index, room, sampling) for index in range(sampling.group_size)],
        )


def _draw(seed: int, room: int, sampling: SamplingPolicy) -> Completion:
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < room and tokens[-1:] != sampling.stop_token_ids[:1]:
        tokens.append(rng.randrange(VOCABULARY))
    stopped = tokens[-1:] == sampling.stop_token_ids[:1]
    return Completion(
        token_ids=tokens,
        logprobs=[_logprob(token) for token in tokens],
        finish_reason="stop" if stopped else "length",
        stop_token_id=tokens[-1] if stopped else None,
    )


def _logprob(token: int) -> float:
    return -0.5 * token if token < VOCABULARY else -math.inf
