"""The reward stage: a samples shard in, a rewards shard and its record out."""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

import pyarrow as pa

from rewards.contract import Part, Score, Status
from storage import environment
from storage.experience import read_shard, rows_to_table, write_shard
from storage.inputs import open_input
from storage.layout import attempt_key
from storage.ledger import find_record, put_record
from storage.object_store import ObjectStore
from storage.records import Metrics, Record, StageRecord
from storage.schemas import PROMPTS, REWARDS, SAMPLES
from tasks.errors import Permanent
from tasks.reward.admission import admit
from tasks.reward.contract import RewardConfig, RewardEngine, RewardRequest, RewardResult
from tasks.reward.decoding import open_decoder
from tasks.reward.grading import Grading
from tasks.reward.inputs import PROMPT_COLUMNS, SAMPLE_COLUMNS, Row, gold_inputs, reward_inputs
from tasks.reward.mixture import combine, is_right
from tasks.workspace import Workspace

logger = logging.getLogger(__name__)

__all__ = ["PACKAGES", "REQUESTS", "admit", "check_golds", "find", "run"]

REQUESTS = {RewardRequest: RewardResult}

PACKAGES = (
    "math-verify",
    "latex2sympy2_extended",
    "sympy",
    "jsonschema",
    "reasoning-gym",
    "tokenizers",
    "pyarrow",
    "pydantic",
)
"""What decides what a rewards shard says."""

_STATUSES: tuple[Status, ...] = ("graded", "grader_error", "grader_timeout", "not_applicable")
_SHOWN = 3


def run(
    request: RewardRequest, store: ObjectStore, engine: RewardEngine, *, workspace: Workspace
) -> RewardResult:
    """Grades one shard, or returns what its record says.

    Writes the rewards shard under a new attempt, then the record; a second call writes nothing.
    Samples that ran into a limit are the one thing that another attempt may see otherwise: the
    record of the first one stands.

    Args:
        request: a samples shard, the prompts that it answers, and how to grade.
        store: where both lie.
        engine: the grading processes.
        workspace: the tokenizer's files are cached there.

    Raises:
        Permanent: too large a share of the samples has no reward (nothing is written), or the
            shards do not belong together.
        Transient: the grading processes do not start.
        Corrupt: samples, prompts or tokenizer are not what their references name.
        ValueError: no usable tokenizer.json.
    """
    found = find(request, store)
    if found is not None:
        return found
    record = _grade(request, store, engine, workspace=workspace)
    winner, _ = put_record(store, request.scope, record)
    return RewardResult(record=winner, reused=winner.attempt != record.attempt)


def find(request: Record, store: ObjectStore) -> RewardResult | None:
    """Returns the result of a request whose record is there: no grader is needed for it."""
    if not isinstance(request, RewardRequest):
        return None
    found = find_record(store, request.scope, stage=request.stage, request_digest=request.digest())
    return None if found is None else RewardResult(record=found, reused=True)


def describe(engine: RewardEngine, config: RewardConfig) -> dict[str, str]:
    """Returns the environment of the stage: what a record says made it."""
    return environment.describe(PACKAGES) | engine.describe(config)


def check_golds(config: RewardConfig, rows: Sequence[Row], *, workspace: Workspace) -> None:
    """Checks at launch that every row of the data sets can be graded (rule 6 of grading).

    Args:
        config: the parts that will grade.
        rows: `prompt_id`, `domain`, `answer` and `extra` (a JSON object) of every prompt.
        workspace: the workers' logs go to its scratch.

    Raises:
        ValueError: rows cannot be graded; the message counts them and names the first. Or no
            sandbox is possible here, or an endpoint's settings are unusable.
    """
    items = gold_inputs(rows)
    with Grading(config, workspace=workspace) as grading:
        scores = grading.grade(items, config=config, mode="check_gold")
    nobody = [
        item.sample_id
        for item, parts in zip(items, scores, strict=True)
        if all(score.status == "not_applicable" for score in parts)
    ]
    if nobody:
        raise ValueError(
            f"No part of reward.parts is for {len(nobody)} of {len(items)} prompts, among them "
            f"{', '.join(nobody[:_SHOWN])}. Expected one at least: look at `domains` of the parts, "
            f"which are compared with {config.domain_column!r}."
        )
    bad = [
        f"{item.sample_id} ({part.stored_name}: {score.reason})"
        for item, parts in zip(items, scores, strict=True)
        for part, score in zip(config.parts, parts, strict=True)
        if score.status in ("grader_error", "grader_timeout")
    ]
    if bad:
        raise ValueError(
            f"{len(bad)} of {len(items)} prompts have a gold answer that their reward cannot "
            f"grade: {'; '.join(bad[:_SHOWN])}. Expected answers that can be read: correct or "
            "remove these rows, or choose another reward for this data set."
        )


def _grade(
    request: RewardRequest, store: ObjectStore, engine: RewardEngine, *, workspace: Workspace
) -> StageRecord:
    """Grades the shard and writes it; returns the record that is still to be put."""
    attempt = uuid.uuid4().hex
    logger.info("%s of %s: attempt %s", request.stage, request.scope.prefix, attempt)
    started = time.perf_counter()
    samples = read_shard(store, request.samples, schema=SAMPLES, columns=SAMPLE_COLUMNS)
    prompts = read_shard(store, request.prompts, schema=PROMPTS, columns=PROMPT_COLUMNS)
    decode = open_decoder(open_input(store, request.model, cache=workspace.cache))
    items = reward_inputs(samples, prompts, decode=decode)
    read = time.perf_counter()
    about = f"{request.scope.prefix} {request.stage}"
    parts = engine.grade(items, config=request.config, about=about)
    scores = combine(request.config, parts, groups=samples.column("group_id").to_pylist())
    graded = time.perf_counter()
    sample_ids = [item.sample_id for item in items]
    _check_failed_share(request, sample_ids, scores)
    key = attempt_key(request.scope, attempt, f"{request.stage}.parquet")
    ref = write_shard(store, rewards_table(sample_ids, scores), schema=REWARDS, key=key)
    timings: Metrics = {
        "read": read - started,
        "grade": graded - read,
        "write": time.perf_counter() - graded,
    }
    described = describe(engine, request.config)
    return StageRecord(
        stage=request.stage,
        request=request.body(),
        request_digest=request.digest(),
        outputs={"rewards": ref},
        attempt=attempt,
        environment=described,
        environment_digest=environment.digest(described),
        timings_s=timings,
        metrics=_metrics(request.config, scores),
        notes=_notes(sample_ids, scores),
    )


def rewards_table(sample_ids: Sequence[str], scores: Sequence[Score]) -> pa.Table:
    """Returns one row per sample, in order; equal scores give equal bytes."""
    rows = [
        {
            "sample_id": sample_id,
            "reward": score.value,
            "status": score.status,
            "reason": score.reason,
            "parts": [_part_row(part) for part in score.parts],
        }
        for sample_id, score in zip(sample_ids, scores, strict=True)
    ]
    return rows_to_table(rows, schema=REWARDS)


def _part_row(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "value": part.value,
        "weight": part.weight,
        "status": part.status,
        "reason": part.reason,
    }


def _check_failed_share(
    request: RewardRequest, sample_ids: Sequence[str], scores: Sequence[Score]
) -> None:
    failed = [
        sample_id
        for sample_id, score in zip(sample_ids, scores, strict=True)
        if score.value is None
    ]
    limit = request.config.max_failed_share
    if not failed or len(failed) <= limit * len(scores):
        return
    named = "; ".join(
        f"{count} {reason}" for reason, count in _reasons(sample_ids, scores).most_common(_SHOWN)
    )
    raise Permanent(
        f"{request.stage} of {request.scope.prefix}: {len(failed)} of {len(scores)} samples have "
        f"no reward ({named}). Expected at most {limit:.0%} (reward.max_failed_share). Among "
        f"them {', '.join(failed[:_SHOWN])}. Nothing was written: correct the reward or the data, "
        "or raise the limits, and resume."
    )


def _reasons(sample_ids: Sequence[str], scores: Sequence[Score]) -> Counter[str]:
    """Counts why samples have no reward, whichever sample it was."""
    return Counter(
        f"{score.status}: {(score.reason or '').replace(repr(sample_id), 'it')}"
        for sample_id, score in zip(sample_ids, scores, strict=True)
        if score.value is None
    )


def _notes(sample_ids: Sequence[str], scores: Sequence[Score]) -> list[str]:
    """Samples that ran into a limit, which a replay may see otherwise, are listed in the record."""
    return [
        f"not replayable: {sample_id}: {score.reason}"
        for sample_id, score in zip(sample_ids, scores, strict=True)
        if any(part.status == "grader_timeout" for part in score.parts)
    ]


def _metrics(config: RewardConfig, scores: Sequence[Score]) -> Metrics:
    """Means over graded samples, counts over all; None where there is nothing to average."""
    rewards = [score.value for score in scores if score.value is not None]
    metrics: Metrics = {
        "num_samples": len(scores),
        "num_graded": len(rewards),
        "graded_share": len(rewards) / len(scores) if scores else None,
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_std": pstdev(rewards) if rewards else None,
    }
    counts = Counter(score.status for score in scores)
    metrics |= {f"num_{status}": counts[status] for status in _STATUSES if status != "graded"}
    for index, part in enumerate(config.parts):
        values = [
            value
            for score in scores
            if score.value is not None and (value := score.parts[index].value) is not None
        ]
        metrics[f"part_{part.stored_name}_mean"] = fmean(values) if values else None
        if part == config.accuracy_part:
            metrics["accuracy"] = _accuracy(scores, index)
    return metrics


def _accuracy(scores: Sequence[Score], index: int) -> float | None:
    """Returns the share of right samples among those with a reward of which the part says it."""
    parts = [score.parts[index] for score in scores if score.value is not None]
    said = [is_right(part.value, part.status, part.reason) for part in parts]
    known = [right for right in said if right is not None]
    return fmean(known) if known else None
