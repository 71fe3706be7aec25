"""The data sets that need no file: their rows, counted and read."""

import random
from typing import Any

import pytest
import reasoning_gym

from tasks.prompts.contract import DatasetConfig
from tasks.prompts.opening import read_rows
from tasks.prompts.rows import Row, Rows


def read(kind: str, **options: Any) -> Rows:
    return read_rows(DatasetConfig(kind=kind, options=options))


def test_addition_has_all_pairs_and_answers_last_digit_first():
    rows = read("addition")
    assert rows.held_out is not None
    assert (len(rows.train), len(rows.held_out)) == (7300, 800)
    by_id = {row.row_id: row for row in rows.train + rows.held_out}
    assert len(by_id) == 8100
    # 37 + 48 = 85, 56 + 56 = 112, 10 + 10 = 20, 99 + 99 = 198
    answers = {"37+48": "58", "56+56": "211", "10+10": "02", "99+99": "891"}
    for name, answer in answers.items():
        assert (by_id[name].prompt, by_id[name].answer) == (f"{name}=", answer)


def test_the_held_out_pairs_are_the_first_800_of_a_fixed_shuffle():
    pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    random.Random(0).shuffle(pairs)
    held_out = read("addition").held_out
    assert held_out is not None
    assert [row.row_id for row in held_out] == [f"{left}+{right}" for left, right in pairs[:800]]


def test_first_letter_has_486_words_and_200_held_out():
    rows = read("first_letter")
    assert rows.held_out is not None
    assert (len(rows.train), len(rows.held_out)) == (486, 200)
    words = [row.row_id for row in rows.train + rows.held_out]
    assert len(set(words)) == 686
    assert all(word.isalpha() and word == word.lower() and 3 <= len(word) <= 7 for word in words)
    assert "know" not in words, "the shot gives its answer away"


def test_first_letter_shows_one_example_and_then_asks():
    row = next(row for row in read("first_letter").train)
    assert row.prompt == [
        {"role": "system", "content": ""},
        {"role": "user", "content": 'What is the first letter of "know"?'},
        {"role": "assistant", "content": "<answer>k</answer>"},
        {"role": "user", "content": f'What is the first letter of "{row.row_id}"?'},
    ]
    assert row.answer == row.row_id[0]


def gym_rows(dataset: str, *, size: int, seed: int = 3, **params: Any) -> list[Row]:
    return read("reasoning_gym", dataset=dataset, size=size, seed=seed, params=params).train


def test_reasoning_gym_gives_the_library_s_tasks_with_what_its_grader_needs():
    rows = gym_rows("chain_sum", size=5, min_terms=3, max_terms=3)
    entries = list(
        reasoning_gym.create_dataset("chain_sum", size=5, seed=3, min_terms=3, max_terms=3)
    )
    assert [(row.prompt, row.answer) for row in rows] == [
        (entry["question"], entry["answer"]) for entry in entries
    ]
    scorer = reasoning_gym.get_score_answer_fn("chain_sum")
    for row in rows:
        entry = {"question": row.prompt, "answer": row.answer, "metadata": row.extra["metadata"]}
        assert row.extra["dataset"] == "chain_sum"
        assert scorer(answer=row.answer, entry=entry) == 1.0


# isomorphic_strings, knight_swap, polynomial_multiplication and ransom_note do as word_ladder does.
@pytest.mark.parametrize("dataset", ["list_functions", "word_ladder"])
def test_tasks_that_follow_hash_seed_or_global_generators_are_pinned(dataset: str):
    assert gym_rows(dataset, size=3) == gym_rows(dataset, size=3)


def test_repeated_tasks_are_left_out_and_counted():
    settings = {"dataset": "count_bits", "size": 100, "params": {"min_n": 1, "max_n": 9}}
    rows = read("reasoning_gym", **settings)
    assert 0 < len(rows.train) <= 9
    assert rows.dropped == {"repeated": 100 - len(rows.train)}


def test_a_task_keeps_its_id_when_another_seed_makes_it_too():
    # Task i is made from seed + i: seeds 1 and 6 share all but ten of their tasks.
    ids = [{row.row_id for row in gym_rows("gcd", size=50, seed=seed)} for seed in (1, 6)]
    assert len(ids[0] & ids[1]) >= 40


def test_settings_that_the_generator_refuses_are_named():
    with pytest.raises(ValueError, match=r"could not generate 5 tasks of 'chain_sum'.*min_terms"):
        gym_rows("chain_sum", size=5, min_terms=0)
