from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rewards import exact
from rewards.contract import RewardInput
from tasks.reward.decoding import completion_text, open_decoder
from tests.unit.reward.tokenizers_for_tests import END, write_tokenizer

TAGGED = "<think>a</think><answer>7</answer>"


@pytest.mark.parametrize("special_tags", [True, False])
def test_tags_stay_and_the_end_mark_goes(tmp_path: Path, special_tags: bool) -> None:
    tokenizer = write_tokenizer(tmp_path, special_tags=special_tags)
    ids = tokenizer.encode(TAGGED + END).ids
    text = completion_text(ids, stop_token_id=ids[-1], decode=open_decoder(tmp_path))
    assert text == TAGGED


@pytest.mark.parametrize("special_tags", [True, False])
def test_cut_off_completion_keeps_its_last_token(tmp_path: Path, special_tags: bool) -> None:
    tokenizer = write_tokenizer(tmp_path, special_tags=special_tags)
    ids = tokenizer.encode(TAGGED).ids
    assert completion_text(ids, stop_token_id=None, decode=open_decoder(tmp_path)) == TAGGED


def test_stop_token_that_closes_the_answer_leaves_the_answer_readable(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, special_tags=True)
    ids = tokenizer.encode("<answer>12</answer>").ids
    text = completion_text(ids, stop_token_id=ids[-1], decode=open_decoder(tmp_path))
    score = exact.score(RewardInput(text, answer="12"), exact.Config())
    assert (text, score.value) == ("<answer>12</answer>", 1.0)


def test_completion_of_the_end_mark_alone_is_empty_text(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, special_tags=False)
    ids = tokenizer.encode(END).ids
    assert completion_text(ids, stop_token_id=ids[0], decode=open_decoder(tmp_path)) == ""


@pytest.mark.parametrize("special_tags", [True, False])
def test_decoding_agrees_with_transformers(tmp_path: Path, special_tags: bool) -> None:
    tokenizer = write_tokenizer(tmp_path, special_tags=special_tags)
    ids = tokenizer.encode(f"{TAGGED} , it 's . {END}").ids
    theirs = AutoTokenizer.from_pretrained(tmp_path).decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    assert open_decoder(tmp_path)(ids) == theirs


def test_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        open_decoder(tmp_path / "empty")
