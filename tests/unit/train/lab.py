"""Reaches into the engines' environment: the controller's has neither torch nor DeepSpeed."""

import os
import pickle
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.home import engines_python
from tasks.train.contract import TrainSample

ROOT = Path(__file__).resolve().parents[3]


class Lab:
    """A child process in the engines' environment that calls functions of `in_engines`."""

    def __init__(self, log: Path, **variables: str) -> None:
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [engines_python(), "-m", "tests.unit.train.in_engines"],
                cwd=ROOT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OMP_WAIT_POLICY": "PASSIVE",
                    **variables,
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
        self._log = log

    def __call__(self, function: str, *positional: Any, **named: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump((function, positional, named), self.process.stdin)
        self.process.stdin.flush()
        try:
            done, answer = pickle.load(self.process.stdout)
        except EOFError as error:
            raise RuntimeError(self._log.read_text()) from error
        if not done:
            raise answer
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def sample(
    name: str,
    *,
    prompt: Sequence[int],
    completion: Sequence[int],
    advantage: float = 1.0,
    rollout: float | Sequence[float] = -1.0,
) -> TrainSample:
    """Returns a sample whose id is `group/number`."""
    count = len(completion)
    logprobs = [rollout] * count if isinstance(rollout, float | int) else list(rollout)
    return TrainSample(
        sample_id=name,
        group_id=name.partition("/")[0],
        prompt_token_ids=list(prompt),
        completion_token_ids=list(completion),
        loss_mask=[True] * count,
        rollout_logprobs=[float(value) for value in logprobs],
        advantage=advantage,
    )
