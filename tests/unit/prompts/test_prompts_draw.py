"""Which rows a step draws: properties over batch sizes, mixtures and cuts."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.records import Cursor, PromptSet, SetCursor
from tasks.prompts.draw import Draw, draw_groups, most_draws, permuted


def prompt_set(rows: int, *, name: str = "only", weight: float = 1.0) -> PromptSet:
    return PromptSet(name=name, weight=weight, train_rows=rows, held_out_rows=0, dropped={})


def draw_steps(
    sets: list[PromptSet], sizes: list[int], *, seed: int = 0
) -> tuple[list[list[Draw]], Cursor]:
    """Draws one step per size; the cursor goes through the store's encoding in between."""
    cursor, steps = Cursor(), []
    for size in sizes:
        draws, cursor = draw_groups(sets, seed=seed, cursor=cursor, round=0, num_groups=size)
        cursor = Cursor.from_bytes(cursor.to_bytes())
        steps.append(draws)
    return steps, cursor


@given(size=st.integers(1, 300), seed=st.integers(0, 2**63 - 1))
def test_a_permutation_reaches_every_row_once(size: int, seed: int):
    key = seed.to_bytes(8, "big")
    assert sorted(permuted(place, key=key, size=size) for place in range(size)) == list(range(size))


def test_the_permutation_is_pinned_because_stored_cursors_rely_on_it():
    order = [permuted(place, key=b"rollbook", size=10) for place in range(10)]
    assert order == [9, 6, 7, 5, 8, 1, 2, 3, 0, 4]


def test_every_row_is_first_about_equally_often():
    firsts = Counter(permuted(0, key=str(trial).encode(), size=10) for trial in range(5000))
    # 500 expected each, standard deviation sqrt(5000 * 0.1 * 0.9) = 21.
    assert all(abs(firsts[row] - 500) < 5 * 21 for row in range(10))


@given(rows=st.integers(1, 40), seed=st.integers(0, 99), choices=st.data())
@settings(max_examples=200, deadline=None)
def test_each_prompt_is_used_once_per_epoch_whatever_the_batch_sizes(
    rows: int, seed: int, choices: st.DataObject
):
    sizes = choices.draw(st.lists(st.integers(1, rows), min_size=1, max_size=25))
    steps, cursor = draw_steps([prompt_set(rows)], sizes, seed=seed)
    for step in steps:
        assert len({draw.row for draw in step}) == len(step)
    counts = Counter(draw.row for step in steps for draw in step)
    consumed = cursor.sets["only"]
    # Epochs 0 to epoch - 1 are whole; of the last one, what lies before the cursor, less deferred.
    key_rows = epoch_rows(seed, consumed.epoch, rows)[: consumed.position]
    last = Counter(key_rows) - Counter(consumed.deferred)
    assert counts == Counter(dict.fromkeys(range(rows), consumed.epoch)) + last


def epoch_rows(seed: int, epoch: int, rows: int) -> list[int]:
    """The order of one epoch, taken from a run that draws one prompt a step."""
    steps, _ = draw_steps([prompt_set(rows)], [1] * (rows * (epoch + 1)), seed=seed)
    return [step[0].row for step in steps[rows * epoch :]]


@given(
    rows=st.lists(st.integers(12, 60), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.05, 20), min_size=4, max_size=4),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_the_mixture_does_not_depend_on_how_the_run_was_cut(
    rows: list[int], weights: list[float], sizes: list[int], seed: int
):
    sets = [
        prompt_set(count, name=f"set-{index}", weight=weights[index])
        for index, count in enumerate(rows)
    ]
    steps, cursor = draw_steps(sets, sizes, seed=seed)
    draws = [draw for step in steps for draw in step]
    assert [draw.number for draw in draws] == list(range(sum(sizes)))
    one_by_one, _ = draw_steps(sets, [1] * sum(sizes), seed=seed)
    assert [draw.set_index for draw in draws] == [step[0].set_index for step in one_by_one]
    for step in steps:
        assert len({(draw.set_index, draw.row) for draw in step}) == len(step)
    for index, found in enumerate(sets):
        counts = Counter(draw.row for draw in draws if draw.set_index == index)
        at = cursor.sets[found.name]
        drawn = at.epoch * found.train_rows + at.position - len(at.deferred)
        assert counts.total() == drawn
        assert {count - at.epoch for count in counts.values()} <= {0, 1}


def test_ten_steps_and_ten_more_equal_twenty():
    sets = [prompt_set(30, name="a", weight=3), prompt_set(20, name="b")]
    whole, end = draw_steps(sets, [7] * 20)
    first, middle = draw_steps(sets, [7] * 10)
    second, cursor = [], middle
    for _ in range(10):
        draws, cursor = draw_groups(sets, seed=0, cursor=cursor, round=0, num_groups=7)
        second.append(draws)
    assert first + second == whole
    assert cursor == end


def test_s22_ten_prompts_batch_two_killed_after_step_three_are_each_used_once():
    first, cursor = draw_steps([prompt_set(10)], [2, 2, 2])
    resumed = []
    for _ in range(2):
        draws, cursor = draw_groups([prompt_set(10)], seed=0, cursor=cursor, round=0, num_groups=2)
        resumed.append(draws)
    assert sorted(draw.row for step in first + resumed for draw in step) == list(range(10))


def test_a_step_over_the_epoch_boundary_defers_what_already_stands_in_it():
    # 5 rows in steps of 3: step 2 takes the last two of epoch 0 and one of epoch 1 that is new.
    for seed in range(20):
        steps, cursor = draw_steps([prompt_set(5)], [3, 3, 3, 3, 3], seed=seed)
        assert all(len({draw.row for draw in step}) == 3 for step in steps)
        assert sorted(draw.row for step in steps for draw in step) == sorted([*range(5)] * 3)
        assert cursor.sets["only"].deferred == []


def test_a_step_may_take_the_whole_set_over_and_over():
    steps, _ = draw_steps([prompt_set(4)], [4, 3, 4, 4, 1])
    assert all(len({draw.row for draw in step}) == len(step) for step in steps)


def test_epochs_and_seeds_have_their_own_order():
    assert epoch_rows(0, 0, 40) != epoch_rows(0, 1, 40)
    assert epoch_rows(0, 0, 40) != epoch_rows(1, 0, 40)


def test_later_rounds_of_a_step_continue_the_first():
    sets = [prompt_set(20)]
    whole, end = draw_groups(sets, seed=0, cursor=Cursor(), round=0, num_groups=15)
    rounds = [
        draw_groups(sets, seed=0, cursor=Cursor(), round=number, num_groups=5)
        for number in range(3)
    ]
    assert [draw for draws, _ in rounds for draw in draws] == whole
    assert rounds[-1][1] == end


def test_more_groups_than_rows_are_refused():
    with pytest.raises(ValueError, match="more groups of 'only' than the 4 training rows"):
        draw_groups([prompt_set(4)], seed=0, cursor=Cursor(), round=0, num_groups=5)


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    num_groups=st.integers(1, 130),
    start=st.integers(0, 10**6),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_no_window_of_draws_takes_more_of_a_set_than_launch_allowed_for(
    weights: list[float], num_groups: int, start: int, seed: int
):
    sets = [
        prompt_set(1000, name=f"set-{index}", weight=weight) for index, weight in enumerate(weights)
    ]
    draws, _ = draw_groups(
        sets, seed=seed, cursor=Cursor(drawn=start), round=0, num_groups=num_groups
    )
    counts = Counter(draw.set_index for draw in draws)
    most = most_draws(weights, num_groups=num_groups)
    assert all(counts[index] <= most[index] for index in range(len(sets)))


def test_shares_follow_the_weights_closely_at_every_length():
    weights = [0.5, 0.3, 0.2]
    sets = [prompt_set(10**6, name=str(weight), weight=weight) for weight in weights]
    draws, _ = draw_groups(sets, seed=5, cursor=Cursor(), round=0, num_groups=2000)
    for length in random.Random(0).sample(range(1, 2001), 50):
        counts = Counter(draw.set_index for draw in draws[:length])
        # Drawing at random would be off by sqrt(2000 * 0.25) = 22 at the end.
        assert all(abs(counts[k] - length * weights[k]) < 3 for k in range(3))


def test_a_fork_whose_set_lost_rows_draws_only_rows_that_are_there():
    # Row 9 was deferred while the set had ten rows; its fork has four.
    inherited = SetCursor(epoch=1, position=7, deferred=[9, 2])
    cursor = Cursor(drawn=17, sets={"only": inherited})
    draws, after = draw_groups([prompt_set(4)], seed=0, cursor=cursor, round=0, num_groups=4)
    assert draws[0].row == 2
    assert sorted(draw.row for draw in draws) == [0, 1, 2, 3]
    assert 9 not in after.sets["only"].deferred
