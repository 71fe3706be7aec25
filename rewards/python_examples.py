"""One reward function of each shape that `python` calls, to copy from and to test with."""

from collections.abc import Sequence
from typing import Any


def equals_answer(
    completions: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float | None]:
    """The shape of TRL: lists in, a list out; columns of the data set come by name."""
    return [
        float(completion.strip() == gold.strip())
        for completion, gold in zip(completions, answer, strict=True)
    ]


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    mark: str = "####",
) -> float:
    """The shape of verl: one sample in, a number (or a dictionary with `score`) out."""
    _, found, answer = solution_str.rpartition(mark)
    return float(bool(found) and answer.strip() == str(ground_truth).strip())


def compute_scores(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[dict[str, Any]],
) -> list[float]:
    """The shape of verl's batch reward manager: lists in, a list out."""
    return [
        compute_score(source, solution, truth, info)
        for source, solution, truth, info in zip(
            data_sources, solution_strs, ground_truths, extra_infos, strict=True
        )
    ]
