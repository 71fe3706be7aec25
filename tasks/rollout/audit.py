"""What a committed samples shard says of itself, held against its request. No engine.

Whether the policy would sample these tokens is a replay's business.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

import pyarrow as pa

from storage.audit_findings import EXACTLY_ONCE, STALENESS, TOKENS, Tally
from storage.audit_tables import other_rows
from storage.experience import read_shard
from storage.object_store import ObjectStore
from storage.records import StageRecord
from storage.schemas import SAMPLES
from tasks.rollout.contract import Completion, FinishedGroup, PromptGroup, RolloutRequest
from tasks.rollout.shard import read_groups, samples_table

MAX_LOGPROB = 1e-6
"""A probability is at most 1; float32 may round its logarithm to a little above 0."""

MIN_ROWS = 10_000
"""So many rows are spelled out whatever is stored, to name the first that is missing."""

_GROUPING = ("sample_id", "group_id", "sample_index")
"""Columns that say which sample it is: compared as such before the others."""


def audit_samples(
    store: ObjectStore,
    request: RolloutRequest,
    record: StageRecord,
    *,
    vocabulary: int | None,
    tally: Tally,
) -> pa.Table:
    """Says so if a samples shard is not what its request asks for; returns its rows.

    Every group of the plan is there with all its completions or its record says why not; each
    sampling field is the one asked for; every token is one that the model knows, and the mark that
    ended a completion is stored (promises 1, 6, 7).

    Args:
        store: holds the prompts and the shard.
        request: what was asked, with the policy to sample from.
        record: what it gave.
        vocabulary: number of token ids that the model knows; None leaves ids unchecked.
        tally: is told.

    Raises:
        NotFound, Corrupt: a shard is gone, or is not what its reference names.
        ValueError: the prompts shard lacks the rows.
    """
    stored = read_shard(store, record.outputs["samples"], schema=SAMPLES)
    groups, notes = read_groups(request, store)
    shard = _Shard(request, record.outputs["samples"].key, stored, stored.to_pylist(), tally)
    complete = _check_groups(shard, groups)
    rows = record.outputs["samples"].rows
    tally.expect(shard.key, "rows", stored.num_rows, rows, promise=EXACTLY_ONCE)
    said = [note for note in record.notes if "was not sampled" in note]
    tally.expect(shard.key, "groups without room", said, notes, promise=EXACTLY_ONCE)
    tally.counts["groups"] += request.stop - request.start
    tally.counts["groups without room"] += len(notes)
    tally.counts["samples"] += stored.num_rows
    if complete:
        _check_fields(shard, groups)
    _check_staleness(shard)
    _check_ids(shard, vocabulary=vocabulary)
    _check_rows(shard)
    return stored


@dataclass(frozen=True)
class _Shard:
    """One samples shard: what was asked, what is stored, and who is told."""

    request: RolloutRequest
    key: str
    stored: pa.Table
    rows: list[Mapping[str, Any]]
    tally: Tally


def _check_groups(shard: _Shard, groups: Sequence[PromptGroup]) -> bool:
    """Checks that every group of the plan is there once, whole; returns whether they are."""
    size = shard.request.sampling.group_size
    expected_rows = size * len(groups)
    # Before the rows are spelled out: a size that somebody made up could fill the memory.
    if expected_rows > max(2 * len(shard.rows), MIN_ROWS):
        found = len(shard.rows)
        shard.tally.expect(shard.key, "samples", found, expected_rows, promise=EXACTLY_ONCE)
        return False
    expected = [f"{group.group_id}-{index}" for group in groups for index in range(size)]
    found = [row["sample_id"] for row in shard.rows]
    at = next(
        (
            index
            for index, (mine, theirs) in enumerate(zip_longest(found, expected))
            if mine != theirs
        ),
        None,
    )
    if at is not None:
        mine, theirs = ([*ids[at : at + 1], "none"][0] for ids in (found, expected))
        name = f"sample {at} of {len(expected)}"
        shard.tally.expect(shard.key, name, mine, theirs, promise=EXACTLY_ONCE)
    return at is None


def _check_fields(shard: _Shard, groups: Sequence[PromptGroup]) -> None:
    """Builds the rows that these completions must have, and compares all columns."""
    known = {group.group_id: group for group in groups}
    finished = [
        FinishedGroup(known[group_id], [_completion(row) for row in members])
        for group_id, members in groupby(shard.rows, key=lambda row: row["group_id"])
        if group_id in known
    ]
    for other in other_rows(shard.stored, samples_table(finished, request=shard.request)):
        columns = [column for column in other.columns if column not in _GROUPING]
        if columns:
            promise = STALENESS if columns == ["version_spans"] else TOKENS
            expected, found = other.expected, other.found
            shard.tally.broken(shard.key, expected=expected, found=found, promise=promise)
            return


def _check_staleness(shard: _Shard) -> None:
    version, sampling = shard.request.policy.version, shard.request.sampling
    for row in shard.rows:
        for span in row["version_spans"]:
            shard.tally.largest("staleness", version - span["policy_version"])
    if shard.request.scope.kind == "step":
        off = (sampling.top_p, sampling.top_k)
        shard.tally.expect(shard.key, "top_p, top_k", off, (1.0, 0), promise=TOKENS)


def _completion(row: Mapping[str, Any]) -> Completion:
    return Completion(
        token_ids=row["completion_token_ids"],
        logprobs=row["rollout_logprobs"],
        finish_reason=row["finish_reason"],
        stop_token_id=row["stop_token_id"],
    )


def _check_ids(shard: _Shard, *, vocabulary: int | None) -> None:
    for column in ("prompt_token_ids", "completion_token_ids"):
        for chunk in shard.stored.column(column).chunks:
            ids = chunk.flatten().to_numpy()
            shard.tally.counts[column] += len(ids)
            if vocabulary is not None and len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
                expected = f"{column} from 0 to {vocabulary - 1}"
                found = f"{ids.min()} to {ids.max()}"
                shard.tally.broken(shard.key, expected=expected, found=found, promise=TOKENS)


def _check_rows(shard: _Shard) -> None:
    stops = set(shard.request.sampling.stop_token_ids)
    for row in shard.rows:
        fault = _fault(row, stops)
        if fault:
            expected, found = f"{fault[0]} in {row['sample_id']}", fault[1]
            shard.tally.broken(shard.key, expected=expected, found=found, promise=TOKENS)


def _fault(row: Mapping[str, Any], stops: set[int]) -> tuple[str, str] | None:
    """Returns what a row must say and what it says, or None if it is sound."""
    tokens: list[int] = row["completion_token_ids"]
    mask, logprobs = row["completion_mask"], row["rollout_logprobs"]
    if not len(tokens) == len(mask) == len(logprobs):
        lengths = (len(tokens), len(mask), len(logprobs))
        return "one mask and one logprob per token", f"{lengths} tokens, masks, logprobs"
    for sampled, logprob in zip(mask, logprobs, strict=True):
        known = logprob is not None and math.isfinite(logprob) and logprob <= MAX_LOGPROB
        if known != sampled:
            return "a logprob of at most 0 where the mask is true, else null", f"{logprob}"
    return _wrong_ending(row, tokens, stops)


def _wrong_ending(
    row: Mapping[str, Any], tokens: list[int], stops: set[int]
) -> tuple[str, str] | None:
    stop, reason = row["stop_token_id"], row["finish_reason"]
    early = stops.intersection(tokens[:-1])
    if early:
        return "nothing after a stop token", f"{early} before the last token"
    if reason == "stop":
        if stop in stops and tokens[-1:] == [stop]:
            return None
        return "the stop token stored last", f"{tokens[-1:]} with stop token {stop}"
    if reason == "length":
        whole = stop is None and len(tokens) == row["max_tokens"]
        is_cut = not stops.intersection(tokens)
        found = f"{len(tokens)} tokens, stop token {stop}"
        return None if whole and is_cut else (f"{row['max_tokens']} tokens and no stop", found)
    return "finish_reason stop or length", f"{reason}"
