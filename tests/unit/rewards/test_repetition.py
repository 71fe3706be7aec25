import time

import pytest
from pydantic import ValidationError

from rewards import repetition
from rewards.contract import RewardInput, Score


def penalty(completion: str, **options: object) -> float | None:
    return repetition.score(RewardInput(completion), repetition.Config(**options)).value


def test_the_penalty_is_the_share_of_repeated_ngrams() -> None:
    # Bigrams: ab ba ab ba ab; 2 of 5 are distinct: 1 - 2/5 = 0.6.
    assert penalty("a b a b a b", ngram_size=2) == pytest.approx(-0.6)
    assert penalty("a b a b a b", ngram_size=2, max_penalty=-0.5) == pytest.approx(-0.3)
    # Trigrams: aba bab aba bab: 1 - 2/4.
    assert penalty("a b a b a b") == pytest.approx(-0.5)


@pytest.mark.parametrize("completion", ["", "one two", "one two three", "a b c d e f"])
def test_what_repeats_nothing_costs_nothing(completion: str) -> None:
    score = repetition.score(RewardInput(completion), repetition.Config())
    assert str(score.value) == "0.0"
    assert score == Score(0.0)


def test_case_and_kind_of_blank_do_not_hide_a_repetition() -> None:
    assert penalty("Wait no,\n wait\tNO, WAIT\u3000no,", ngram_size=2) == pytest.approx(-0.6)


def test_scripts_without_blanks_are_read_by_character() -> None:
    # 今天 今天 今天: bigrams 今天 天今 今天 天今 今天.
    assert penalty("今天今天今天", ngram_size=2) == pytest.approx(-0.6)
    assert penalty("нет да нет да нет да", ngram_size=2) == pytest.approx(-0.6)


def test_token_ids_are_counted_where_asked() -> None:
    item = RewardInput("different words here", token_ids=[4, 9, 4, 9, 4, 9])
    config = repetition.Config(unit="tokens", ngram_size=2)
    assert repetition.score(item, config) == Score(pytest.approx(-0.6), reason="repeated")
    assert repetition.score(item, repetition.Config()) == Score(0.0)


def test_thinking_counts_unless_only_the_visible_text_is_asked_for() -> None:
    completion = "<think> hm hm hm hm hm </think> done"
    # 8 words, 6 trigrams, of which "hm hm hm" is there three times: 1 - 4/6.
    assert penalty(completion) == pytest.approx(-1 / 3)
    assert penalty(completion, text="visible") == 0.0


def test_a_gain_is_refused() -> None:
    with pytest.raises(ValidationError, match="less than 0"):
        repetition.Config(max_penalty=0.5)


def test_time_is_linear_in_the_length() -> None:
    def seconds(times: int) -> float:
        item = RewardInput("wait 等 " * times + "\ud800")
        begin = time.process_time()
        repetition.score(item, repetition.Config(ngram_size=20))
        return time.process_time() - begin

    seconds(1_000)
    # 16 times the text: linear takes 16 times as long, quadratic 256 times.
    assert seconds(80_000) < 80 * seconds(5_000) + 0.2
