"""Joins samples to their prompts and decodes them: what graders are given."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rewards.contract import RewardInput
from tasks.errors import Permanent
from tasks.reward.decoding import Decode, completion_text

PROMPT_COLUMNS = ["group_id", "domain", "prompt_token_ids", "answer", "extra"]
GOLD_COLUMNS = ["prompt_id", "domain", "answer", "extra"]
SAMPLE_COLUMNS = [
    "sample_id",
    "group_id",
    "completion_token_ids",
    "finish_reason",
    "stop_token_id",
]

Row = Mapping[str, Any]


def reward_inputs(samples: pa.Table, prompts: pa.Table, *, decode: Decode) -> list[RewardInput]:
    """Returns one input per sample, in the order of the samples shard.

    Raises:
        Permanent: a group is there twice, or a sample's group is not there.
    """
    asked = _by_group(prompts.to_pylist())
    rows = samples.to_pylist()
    missing = sorted({row["group_id"] for row in rows} - set(asked))
    if missing:
        raise Permanent(
            f"{len(missing)} groups of the samples shard are not in the prompts shard, among them "
            f"{', '.join(missing[:3])}. Expected the prompts that the samples were drawn for."
        )
    groups = {row["group_id"] for row in rows}
    texts = {group: decode(asked[group]["prompt_token_ids"]) for group in groups}
    extras = {group: _extra(asked[group]) for group in groups}
    return [
        RewardInput(
            completion=completion_text(
                row["completion_token_ids"], stop_token_id=row["stop_token_id"], decode=decode
            ),
            answer=asked[row["group_id"]]["answer"],
            sample_id=row["sample_id"],
            prompt=texts[row["group_id"]],
            extra=extras[row["group_id"]],
            finish_reason=row["finish_reason"],
            token_ids=row["completion_token_ids"],
            domain=asked[row["group_id"]]["domain"],
        )
        for row in rows
    ]


def gold_inputs(rows: Sequence[Row]) -> list[RewardInput]:
    """Returns the data set's side of prompt rows (`prompt_id`, `domain`, `answer`, `extra`)."""
    return [
        RewardInput(
            "",
            answer=row["answer"],
            sample_id=row["prompt_id"],
            extra=_extra(row),
            domain=row["domain"],
        )
        for row in rows
    ]


def _by_group(rows: Sequence[Row]) -> dict[str, Row]:
    by_group = {row["group_id"]: row for row in rows}
    if len(by_group) != len(rows):
        raise Permanent(
            f"The prompts shard has {len(rows)} rows for {len(by_group)} groups. Expected one row "
            "per group: an answer could belong to another prompt."
        )
    return by_group


def _extra(row: Row) -> Mapping[str, Any]:
    return json.loads(row["extra"]) if row["extra"] else {}
