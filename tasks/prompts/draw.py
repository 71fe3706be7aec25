"""Which rows the groups of a step are: functions of seed, mixture and cursor, without state.

No store and no tokens here. K numbers the sets of the mixture.
"""

import bisect
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from storage.records import Cursor, PromptSet, SetCursor

UNIT = 1 << 64
GOLDEN_STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd: its multiples fill the unit circle most evenly."""

FEISTEL_ROUNDS = 8


@dataclass(frozen=True)
class Draw:
    """One drawn group: its number in the run, and the row of which set it takes."""

    number: int
    set_index: int
    row: int


@dataclass
class _SetState:
    """One set while a step is drawn; `in_step` are the rows that stand in the step."""

    name: str
    num_rows: int
    epoch: int
    position: int
    deferred: list[int]
    in_step: set[int] = field(default_factory=set[int])


def draw_groups(
    sets: Sequence[PromptSet], *, seed: int, cursor: Cursor, round: int, num_groups: int
) -> tuple[list[Draw], Cursor]:
    """Returns the groups of one round of a step, in order, and the cursor after it.

    Which set draw n takes follows from seed, weights and n alone. Within a set every row comes
    once per epoch, in an order that is new in every epoch, and no row comes twice in a step: a
    row of the new epoch that already stands in the step is deferred to the next one. The cost is
    that of the groups drawn, whatever the size of the sets.

    Args:
        sets: the mixture, in the order of the stored prompts.
        seed: the run's seed.
        cursor: the cursor before the step, for every round of it.
        round: how many times `num_groups` were drawn in this step before.
        num_groups: groups of the round.

    Raises:
        ValueError: the step asks for more groups of a set than the set has rows.
    """
    states = [_open_state(prompts, cursor) for prompts in sets]
    bounds = _bounds([prompts.weight for prompts in sets])
    offset = _mixture_offset(seed)
    draws: list[Draw] = []
    for number in range(cursor.drawn, cursor.drawn + (round + 1) * num_groups):
        point = (offset + number * GOLDEN_STEP) % UNIT
        index = bisect.bisect_right(bounds, point)
        draws.append(Draw(number=number, set_index=index, row=_next_row(states[index], seed=seed)))
    # What other mixtures of the run consumed stays on record.
    after = cursor.sets | {state.name: _close_state(state) for state in states}
    return draws[round * num_groups :], Cursor(drawn=draws[-1].number + 1, sets=after)


def most_draws(weights: Sequence[float], *, num_groups: int) -> list[int]:
    """Returns for each set the most groups that any `num_groups` draws in a row take of it.

    Draws in a row are points on a circle, each `GOLDEN_STEP` after the one before, and a set is an
    arc: so this is the most points that an arc of that length can hold, wherever it lies.
    """
    bounds = _bounds(weights)
    lengths = [after - before for before, after in zip([0, *bounds], bounds, strict=False)]
    points = sorted(number * GOLDEN_STEP % UNIT for number in range(num_groups))
    return [_most_in_arc(points, length) for length in lengths]


def permuted(position: int, *, key: bytes, size: int) -> int:
    """Returns where a keyed permutation of range(`size`) sends `position`.

    A balanced Feistel network (Luby and Rackoff 1988) over the next power of four, its round
    function sha256, walked until it lands inside (Black and Rogaway 2002, cycle walking): constant
    memory, and the same in every version of Python, numpy and their generators.
    """
    assert 0 <= position < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = position
    while True:
        value = _feistel(value, key=key, half_bits=half_bits)
        if value < size:
            return value


def _feistel(value: int, *, key: bytes, half_bits: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(FEISTEL_ROUNDS):
        payload = key + number.to_bytes(1, "big") + right.to_bytes(8, "big")
        mixed = int.from_bytes(hashlib.sha256(payload).digest()[:8], "big")
        left, right = right, left ^ (mixed & mask)
    return left << half_bits | right


def _next_row(state: _SetState, *, seed: int) -> int:
    if len(state.in_step) == state.num_rows:
        raise ValueError(
            f"A step asks for more groups of {state.name!r} than the {state.num_rows} training "
            "rows that it has. Expected each prompt at most once in a step: lower "
            "prompts.groups_per_step or the set's weight, or give it more rows."
        )
    row = _deferred_row(state)
    while row is None:
        if state.position >= state.num_rows:
            # Else every row stands in this step, and the set had been found exhausted above.
            assert not state.deferred
            state.epoch, state.position = state.epoch + 1, 0
        key = _epoch_key(seed, state.name, state.epoch)
        candidate = permuted(state.position, key=key, size=state.num_rows)
        state.position += 1
        if candidate in state.in_step:
            state.deferred.append(candidate)
        else:
            row = candidate
    state.in_step.add(row)
    return row


def _deferred_row(state: _SetState) -> int | None:
    for index, row in enumerate(state.deferred):
        if row not in state.in_step:
            return state.deferred.pop(index)
    return None


def _open_state(prompts: PromptSet, cursor: Cursor) -> _SetState:
    before = cursor.sets.get(prompts.name, SetCursor())
    return _SetState(
        name=prompts.name,
        num_rows=prompts.train_rows,
        epoch=before.epoch,
        position=before.position,
        # A fork of changed data inherits the cursor, and its set may have fewer rows.
        deferred=[row for row in before.deferred if row < prompts.train_rows],
    )


def _close_state(state: _SetState) -> SetCursor:
    return SetCursor(epoch=state.epoch, position=state.position, deferred=state.deferred)


def _bounds(weights: Sequence[float]) -> list[int]:
    """Returns where each set's arc of the circle ends, [K]; the last one is the whole circle."""
    shares = [Fraction(weight) for weight in weights]
    total = sum(shares)
    return [int(UNIT * sum(shares[: index + 1]) / total) for index in range(len(shares))]


def _most_in_arc(points: Sequence[int], length: int) -> int:
    if length >= UNIT:
        return len(points)
    around = [*points, *(point + UNIT for point in points)]
    return max(
        bisect.bisect_left(around, point + length) - index for index, point in enumerate(points)
    )


@functools.lru_cache(maxsize=64)
def _epoch_key(seed: int, name: str, epoch: int) -> bytes:
    return hashlib.sha256(f"{seed}/epoch/{epoch}/{name}".encode()).digest()


def _mixture_offset(seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/mixture".encode()).digest()[:8], "big")
