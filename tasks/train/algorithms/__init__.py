"""The dictionary of algorithms: one file here, one line below."""

from tasks.train.algorithms import grpo
from tasks.train.algorithms.contract import Algorithm

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": grpo,
}
