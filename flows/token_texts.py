"""A completion as text by token, with what the learner made of the tokens that stand out."""

import math
from collections.abc import Iterator, Sequence

from storage.records import Record
from tasks.reward.decoding import Decode

FAR = 1.25
"""A token whose ratio, or its inverse, is above this is marked; GRPO clips at 1.2."""
EXTREME = 2.0
MAX_LOG_RATIO = 700.0
"""exp of more is no float."""
MAX_TOKENS_OF_A_CHARACTER = 8
_OPEN = "\ufffd"
"""What tokenizers give for the first bytes of a character whose others follow."""


class Piece(Record):
    """Tokens [start, stop) of a completion as text.

    `ratio` is exp(learner - sampler) of a token that is marked because it is far from 1; null for
    the tokens between such, which stand together. `sampled` is false for what the policy did not
    write.
    """

    text: str
    start: int
    stop: int
    ratio: float | None
    sampled: bool


def token_ratios(
    rollout_logprobs: Sequence[float | None], learner_logprobs: Sequence[float | None] | None
) -> list[float | None]:
    """Returns exp(learner - sampler) of each token; null where one of them has no logprob."""
    learner = learner_logprobs or [None] * len(rollout_logprobs)
    return [
        None if theirs is None or ours is None else _ratio(ours - theirs)
        for theirs, ours in zip(rollout_logprobs, learner, strict=True)
    ]


def _ratio(difference: float) -> float:
    return math.exp(max(min(difference, MAX_LOG_RATIO), -MAX_LOG_RATIO))


def is_far(ratio: float | None, limit: float = FAR) -> bool:
    """Whether sampler and learner disagree by more than `limit`, in either direction."""
    return ratio is not None and (ratio > limit or ratio < 1 / limit)


def completion_pieces(
    token_ids: Sequence[int],
    *,
    ratios: Sequence[float | None],
    mask: Sequence[bool],
    decode: Decode,
) -> list[Piece]:
    """Returns the completion with far tokens on their own, and what lies between them together."""
    if not any(map(is_far, ratios)) and all(mask):
        spans = [(decode(token_ids), 0, len(token_ids))] if token_ids else []
    else:
        spans = list(_token_texts(token_ids, decode))
    pieces: list[Piece] = []
    for text, start, stop in spans:
        far = [ratio for ratio in ratios[start:stop] if ratio is not None and is_far(ratio)]
        ratio = max(far, key=lambda value: abs(math.log(value)), default=None)
        piece = Piece(text=text, start=start, stop=stop, ratio=ratio, sampled=all(mask[start:stop]))
        last = pieces[-1] if pieces else None
        if last and last.ratio is None and ratio is None and last.sampled == piece.sampled:
            joined = {"text": last.text + text, "stop": stop}
            pieces[-1] = last.model_copy(update=joined)
        else:
            pieces.append(piece)
    return pieces


def _token_texts(token_ids: Sequence[int], decode: Decode) -> Iterator[tuple[str, int, int]]:
    """Yields (text, start, stop) of the fewest tokens that make whole characters.

    A token's text depends on the one before it (spaces), so both are decoded and compared.
    """
    before, start = 0, 0
    for stop in range(1, len(token_ids) + 1):
        text = decode(token_ids[before:stop])
        is_open = text.endswith(_OPEN) and stop < len(token_ids)
        if not is_open or stop - start >= MAX_TOKENS_OF_A_CHARACTER:
            known = decode(token_ids[before:start]) if start > before else ""
            yield text[len(known) :], start, stop
            before, start = start, stop
