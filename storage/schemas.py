"""The declared Arrow schemas of experience, version 1; shards are never of an inferred schema.

A released schema never changes: a new version is a new set of constants, and the old one stays
readable.
"""

import pyarrow as pa


def _list_of(item: pa.DataType) -> pa.ListType:
    """Parquet calls list items `element`; saying so here keeps both sides of a round trip equal."""
    return pa.list_(pa.field("element", item))


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


TOKEN_IDS = _list_of(pa.int32())
LOGPROBS = _list_of(pa.float32())
"""float32 in memory and in Parquet: bf16 turns a ratio of 0.96 into 1.0."""

VERSION_SPAN = pa.struct(
    [
        pa.field("start", pa.int32()),
        pa.field("policy_version", pa.int64()),
        pa.field("policy_digest", pa.string()),
    ]
)
"""From completion token `start` on, this policy sampled."""

REWARD_PART = pa.struct(
    [
        pa.field("name", pa.string()),
        pa.field("value", pa.float64()),
        pa.field("weight", pa.float64()),
        pa.field("status", pa.string()),
        pa.field("reason", pa.string()),
    ]
)

PROMPTS = pa.schema(
    [
        _required("prompt_id", pa.string()),
        _required("group_id", pa.string()),
        _required("domain", pa.string()),
        _required("prompt_token_ids", TOKEN_IDS),
        pa.field("answer", pa.string()),
        pa.field("extra", pa.string()),
    ]
)
"""One row per prompt group; `extra` is a JSON object."""

SAMPLES = pa.schema(
    [
        _required("sample_id", pa.string()),
        _required("group_id", pa.string()),
        _required("sample_index", pa.int32()),
        _required("prompt_token_ids", TOKEN_IDS),
        _required("completion_token_ids", TOKEN_IDS),
        _required("completion_mask", _list_of(pa.bool_())),
        _required("rollout_logprobs", LOGPROBS),
        _required("finish_reason", pa.string()),
        pa.field("stop_token_id", pa.int32()),
        _required("seed", pa.int64()),
        _required("temperature", pa.float64()),
        _required("top_p", pa.float64()),
        _required("top_k", pa.int32()),
        _required("max_tokens", pa.int32()),
        _required("version_spans", _list_of(VERSION_SPAN)),
    ]
)
"""One row per sample: what the sampler did. Masked tokens carry a null logprob."""

REWARDS = pa.schema(
    [
        _required("sample_id", pa.string()),
        pa.field("reward", pa.float64()),
        _required("status", pa.string()),
        pa.field("reason", pa.string()),
        _required("parts", _list_of(REWARD_PART)),
    ]
)
"""One row per sample: what the graders said. `reward` is null unless `status` is `graded`."""

TRAIN = pa.schema(
    [
        _required("sample_id", pa.string()),
        _required("group_id", pa.string()),
        pa.field("advantage", pa.float64()),
        _required("kept", pa.bool_()),
        pa.field("reason", pa.string()),
        pa.field("learner_logprobs", LOGPROBS),
    ]
)
"""One row per sample: what the algorithm made of it. Logprobs are null if it was not trained."""

SCHEMAS: dict[str, pa.Schema] = {
    "prompts": PROMPTS,
    "samples": SAMPLES,
    "rewards": REWARDS,
    "train": TRAIN,
}
