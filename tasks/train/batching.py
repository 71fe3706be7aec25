"""Packs samples into rows and rows into micro-batches; numpy only, the ranks make tensors of them.

A row is one prompt and as many completions of its group as fit behind it. Every completion
attends to the prompt and to itself, never to its neighbours, so a prompt is computed once per row
instead of once per completion. The last token of a completion is only predicted, never read: it
takes no place in the row.

Dimensions: `R` rows, `T` positions of the longest row, `N` completion tokens of all rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.train.contract import TrainSample

PROMPT_SEGMENT = 0
PADDING_SEGMENT = -1


@dataclass(frozen=True)
class Row:
    """One prompt with completions (never empty ones), and the positions that it takes."""

    samples: tuple[TrainSample, ...]
    num_positions: int


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass on one rank works on.

    `segments_RT` is 0 for the prompt, k for the row's k-th completion, -1 for padding. Token n is
    predicted from position (`rows_N`, `columns_N`). `sample_index_N` counts `sample_ids`. The
    micro-batch that only fills a rank has no `sample_ids`, weight zero and mask false.
    """

    token_ids_RT: NDArray[np.int64]
    position_ids_RT: NDArray[np.int64]
    segments_RT: NDArray[np.int64]
    rows_N: NDArray[np.int64]
    columns_N: NDArray[np.int64]
    targets_N: NDArray[np.int64]
    sample_index_N: NDArray[np.int64]
    mask_N: NDArray[np.bool_]
    rollout_logprobs_N: NDArray[np.float32]
    advantages_N: NDArray[np.float32]
    weights_N: NDArray[np.float32]
    old_logprobs_N: NDArray[np.float32] | None
    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...] = field(default=())
    """Completion tokens of each of `sample_ids`."""

    def by_sample(self, values_N: NDArray[np.float32]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yields every sample's part of `values_N`."""
        start = 0
        for sample_id, length in zip(self.sample_ids, self.lengths, strict=True):
            yield sample_id, values_N[start : start + length]
            start += length


def pack_rows(samples: Sequence[TrainSample], *, max_row_tokens: int) -> list[Row]:
    """Returns rows in the order of their first sample; deterministic.

    A completion that does not fit behind its prompt within `max_row_tokens` still gets a row of
    its own: the limit is on sharing, not on length. Completions without tokens take no row.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[TrainSample]] = {}
    for sample in samples:
        if sample.completion_token_ids:
            key = (sample.group_id, tuple(sample.prompt_token_ids))
            groups.setdefault(key, []).append(sample)
    return [
        row
        for (_, prompt), members in groups.items()
        for row in _fill(members, len(prompt), max_row_tokens)
    ]


def _fill(members: Sequence[TrainSample], prompt_length: int, limit: int) -> Iterator[Row]:
    row: list[TrainSample] = []
    length = prompt_length
    for sample in members:
        added = len(sample.completion_token_ids) - 1
        if row and length + added > limit:
            yield Row(tuple(row), length)
            row, length = [], prompt_length
        row.append(sample)
        length += added
    yield Row(tuple(row), length)


def divide_rows(
    rows: Sequence[Row], *, ranks: int, micro_batch_tokens: int
) -> list[list[list[Row]]]:
    """Returns, per rank, the rows of each of its micro-batches; every rank has equally many.

    Longest rows first, each to the rank that has least, so that ranks end together and rows of
    one micro-batch are about equally long. A rank short of micro-batches gets empty ones.
    """
    ordered = sorted(rows, key=lambda row: -row.num_positions)
    rank_rows: list[list[Row]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in ordered:
        rank = loads.index(min(loads))
        rank_rows[rank].append(row)
        loads[rank] += row.num_positions
    divided = [_cut(mine, micro_batch_tokens) for mine in rank_rows]
    most = max(len(batches) for batches in divided)
    return [batches + [[]] * (most - len(batches)) for batches in divided]


def _cut(rows: Sequence[Row], micro_batch_tokens: int) -> list[list[Row]]:
    batches: list[list[Row]] = []
    for row in rows:  # longest first, so the first row of a batch sets its width
        if batches and (len(batches[-1]) + 1) * batches[-1][0].num_positions <= micro_batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def build(
    rows: Sequence[Row],
    *,
    weights: Mapping[str, float],
    old_logprobs: Mapping[str, NDArray[np.float32]] | None = None,
) -> MicroBatch:
    """Returns the arrays of one micro-batch; without rows the one that only fills a rank.

    Args:
        rows: what `divide_rows` put together.
        weights: weight per unmasked token, by sample id.
        old_logprobs: the learner's logprobs before the update, by sample id; None if they are
            the policy's own.
    """
    if not rows:
        return _filler(with_old=old_logprobs is not None)
    samples = [sample for row in rows for sample in row.samples]
    lengths = [len(sample.completion_token_ids) for sample in samples]
    mask_N = _join([sample.loss_mask for sample in samples], np.bool_)
    rollout_N = _join([sample.rollout_logprobs for sample in samples], np.float32)
    rows_N, columns_N = _predicting_positions(rows)
    token_ids_RT, position_ids_RT, segments_RT = _lay_out(rows)
    return MicroBatch(
        token_ids_RT=token_ids_RT,
        position_ids_RT=position_ids_RT,
        segments_RT=segments_RT,
        rows_N=rows_N,
        columns_N=columns_N,
        targets_N=_join([sample.completion_token_ids for sample in samples], np.int64),
        sample_index_N=np.repeat(np.arange(len(samples)), lengths),
        mask_N=mask_N,
        rollout_logprobs_N=np.where(mask_N, rollout_N, np.float32(0)),
        advantages_N=np.repeat([sample.advantage for sample in samples], lengths).astype("f4"),
        weights_N=np.repeat([weights[sample.sample_id] for sample in samples], lengths).astype(
            "f4"
        ),
        old_logprobs_N=None
        if old_logprobs is None
        else np.concatenate([old_logprobs[sample.sample_id] for sample in samples]),
        sample_ids=tuple(sample.sample_id for sample in samples),
        lengths=tuple(lengths),
    )


def _lay_out(rows: Sequence[Row]) -> tuple[NDArray[np.int64], ...]:
    width = max(row.num_positions for row in rows)
    token_ids_RT = np.zeros((len(rows), width), dtype=np.int64)
    position_ids_RT = np.zeros((len(rows), width), dtype=np.int64)
    segments_RT = np.full((len(rows), width), PADDING_SEGMENT, dtype=np.int64)
    for index, row in enumerate(rows):
        prompt = row.samples[0].prompt_token_ids
        pieces = [prompt, *(sample.completion_token_ids[:-1] for sample in row.samples)]
        stop = 0
        for segment, piece in enumerate(pieces):
            start, stop = stop, stop + len(piece)
            first = 0 if segment == PROMPT_SEGMENT else len(prompt)
            token_ids_RT[index, start:stop] = piece
            position_ids_RT[index, start:stop] = np.arange(first, first + len(piece))
            segments_RT[index, start:stop] = segment
    return token_ids_RT, position_ids_RT, segments_RT


def _predicting_positions(rows: Sequence[Row]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A completion's first token is predicted by the prompt's last, the others by its own."""
    rows_N: list[int] = []
    columns_N: list[int] = []
    for index, row in enumerate(rows):
        prompt_length = len(row.samples[0].prompt_token_ids)
        start = prompt_length
        for sample in row.samples:
            inner = len(sample.completion_token_ids) - 1
            rows_N.extend([index] * (inner + 1))
            columns_N.append(prompt_length - 1)
            columns_N.extend(range(start, start + inner))
            start += inner
    return np.array(rows_N, dtype=np.int64), np.array(columns_N, dtype=np.int64)


def _join(lists: Sequence[Sequence[float]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.asarray(values, dtype=dtype) for values in lists])


def _filler(*, with_old: bool) -> MicroBatch:
    """One token predicted with weight zero: keeps a rank in step with the others' collectives."""
    zero = np.zeros(1, dtype=np.int64)
    zero_float = np.zeros(1, dtype=np.float32)
    return MicroBatch(
        token_ids_RT=zero[None],
        position_ids_RT=zero[None],
        segments_RT=zero[None],
        rows_N=zero,
        columns_N=zero,
        targets_N=zero,
        sample_index_N=zero,
        mask_N=np.zeros(1, dtype=np.bool_),
        rollout_logprobs_N=zero_float,
        advantages_N=zero_float,
        weights_N=zero_float,
        old_logprobs_N=zero_float if with_old else None,
        sample_ids=(),
    )
