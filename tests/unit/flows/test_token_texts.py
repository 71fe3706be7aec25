import math

import pytest

from flows.token_texts import completion_pieces, is_far, token_ratios

BYTES = {1: b"a", 2: b"b", 3: b"c", 4: "é".encode()[:1], 5: "é".encode()[1:], 6: b"\xff"}


def decode(token_ids) -> str:
    return b"".join(BYTES[token_id] for token_id in token_ids).decode(errors="replace")


def pieces(token_ids: list[int], ratios: list[float | None], mask: list[bool] | None = None):
    found = completion_pieces(
        token_ids, ratios=ratios, mask=mask or [True] * len(token_ids), decode=decode
    )
    return [(piece.text, piece.start, piece.stop, piece.ratio, piece.sampled) for piece in found]


def test_ratios_are_learner_over_sampler():
    # exp(-1 - -1.5) = exp(0.5); a token that one of them has no logprob of has no ratio.
    assert token_ratios([-1.5, None, -1.0], [-1.0, -1.0, None]) == [math.exp(0.5), None, None]
    assert token_ratios([-1.0, -2.0], None) == [None, None]


def test_ratios_stay_finite():
    assert token_ratios([-2000.0, 0.0], [0.0, -2000.0]) == [math.exp(700), math.exp(-700)]


@pytest.mark.parametrize(
    ("ratio", "far"), [(1.0, False), (1.25, False), (1.3, True), (0.8, False), (0.79, True)]
)
def test_a_ratio_is_far_in_both_directions(ratio: float, far: bool):
    assert is_far(ratio) is far


def test_tokens_between_far_ones_stand_together():
    assert pieces([1, 2, 3, 1], [1.0, 1.1, 2.5, 1.0]) == [
        ("ab", 0, 2, None, True),
        ("c", 2, 3, 2.5, True),
        ("a", 3, 4, None, True),
    ]


def test_without_far_tokens_there_is_one_piece():
    assert pieces([1, 2, 3], [1.0, None, 1.0]) == [("abc", 0, 3, None, True)]
    assert pieces([], []) == []


def test_a_character_of_two_tokens_is_one_piece_with_the_farther_ratio():
    assert pieces([1, 4, 5, 2], [1.0, 1.5, 0.2, 1.0]) == [
        ("a", 0, 1, None, True),
        ("é", 1, 3, 0.2, True),
        ("b", 3, 4, None, True),
    ]


def test_what_was_not_sampled_stands_apart():
    assert pieces([1, 2, 3], [1.0, None, 1.0], [True, False, True]) == [
        ("a", 0, 1, None, True),
        ("b", 1, 2, None, False),
        ("c", 2, 3, None, True),
    ]


def test_bytes_that_are_no_text_do_not_grow_without_end():
    found = pieces([6] * 20 + [1], [3.0] * 21)
    assert "".join(text for text, *_ in found) == "\ufffd" * 20 + "a"
    assert max(stop - start for _, start, stop, *_ in found) <= 8
