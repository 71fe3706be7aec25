"""Rows and micro-batches: every token once, behind its own prompt, within the budget."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.train.batching import Row, build, divide_rows, pack_rows
from tasks.train.contract import TrainSample
from tests.unit.train.lab import sample

GROUPS = st.lists(
    st.tuples(
        st.lists(st.integers(2, 9), min_size=1, max_size=12),
        st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=9), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=6,
)


def samples_of(groups) -> list[TrainSample]:
    return [
        sample(f"{number}/{index}", prompt=prompt, completion=completion)
        for number, (prompt, completions) in enumerate(groups)
        for index, completion in enumerate(completions)
    ]


def test_row_holds_the_prompt_once_and_no_last_tokens():
    two = [
        sample("g/0", prompt=[5, 6, 7], completion=[8, 9, 1]),
        sample("g/1", prompt=[5, 6, 7], completion=[4, 1]),
    ]
    (row,) = pack_rows(two, max_row_tokens=100)
    batch = build([row], weights={"g/0": 0.2, "g/1": 0.2})
    assert batch.token_ids_RT.tolist() == [[5, 6, 7, 8, 9, 4]]
    assert batch.position_ids_RT.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert batch.segments_RT.tolist() == [[0, 0, 0, 1, 1, 2]]
    # 8 and 4 are predicted by the prompt's last token, 9 by 8, the ends by what stands before.
    assert batch.targets_N.tolist() == [8, 9, 1, 4, 1]
    assert batch.columns_N.tolist() == [2, 3, 4, 2, 5]
    assert batch.sample_index_N.tolist() == [0, 0, 0, 1, 1]


def test_row_limit_cuts_sharing_but_not_a_completion():
    long = [sample(f"g/{n}", prompt=[2] * 10, completion=[3] * 6) for n in range(3)]
    assert [len(row.samples) for row in pack_rows(long, max_row_tokens=20)] == [2, 1]
    assert [len(row.samples) for row in pack_rows(long, max_row_tokens=5)] == [1, 1, 1]


def test_mask_ends_with_the_completion_and_the_end_token_is_trained_a36():
    # Completions come with their own lengths; 1 is the end token. Nothing follows an end, and a
    # truncated completion has none.
    given_ids = [[5, 6, 1], [5, 6, 7, 8, 9], [5, 6, 7, 8, 1]]
    batch = build(
        pack_rows(
            [sample(f"g/{n}", prompt=[2], completion=ids) for n, ids in enumerate(given_ids)],
            max_row_tokens=100,
        ),
        weights=dict.fromkeys(("g/0", "g/1", "g/2"), 1.0),
    )
    masks = [values.tolist() for _, values in batch.by_sample(batch.mask_N.astype(np.float32))]
    assert masks == [[1] * 3, [1] * 5, [1] * 5]
    assert [list(v) for _, v in batch.by_sample(batch.targets_N.astype(np.float32))] == given_ids


def test_groups_with_equal_prompts_do_not_share_a_row():
    rows = pack_rows(
        [
            sample("draw-1/0", prompt=[5], completion=[6, 1]),
            sample("draw-2/0", prompt=[5], completion=[7, 1]),
        ],
        max_row_tokens=100,
    )
    assert len(rows) == 2


@given(GROUPS, st.integers(1, 40), st.integers(1, 80), st.integers(1, 3))
def test_every_completion_token_is_predicted_once_from_its_own_past(
    groups, max_row_tokens, micro_batch_tokens, ranks
):
    samples = samples_of(groups)
    weights = {one.sample_id: 1.0 for one in samples}
    divided = divide_rows(
        pack_rows(samples, max_row_tokens=max_row_tokens),
        ranks=ranks,
        micro_batch_tokens=micro_batch_tokens,
    )
    assert len({len(mine) for mine in divided}) == 1
    seen: dict[str, list[int]] = {}
    for cut in (cut for mine in divided for cut in mine):
        batch = build(cut, weights=weights)
        num_rows, width = batch.token_ids_RT.shape
        assert num_rows == 1 or num_rows * width <= micro_batch_tokens
        for name, targets in batch.by_sample(batch.targets_N.astype(np.float32)):
            assert name not in seen
            seen[name] = [int(value) for value in targets]
        assert_pasts(batch, {one.sample_id: one for one in samples})
    assert seen == {one.sample_id: one.completion_token_ids for one in samples}


def assert_pasts(batch, by_id):
    """Walks the attention mask: what predicts a token is its prompt and its own completion."""
    for n in range(len(batch.targets_N)):
        if not batch.sample_ids:
            assert not batch.mask_N[n]
            continue
        row, column = batch.rows_N[n], batch.columns_N[n]
        segments = batch.segments_RT[row]
        visible = [
            position
            for position in range(column + 1)
            if segments[position] in (0, segments[column])
        ]
        past = [int(batch.token_ids_RT[row, position]) for position in visible]
        one = by_id[batch.sample_ids[batch.sample_index_N[n]]]
        within = len(past) - len(one.prompt_token_ids)
        assert past == [*one.prompt_token_ids, *one.completion_token_ids[:within]]
        assert batch.targets_N[n] == one.completion_token_ids[within]
        assert batch.position_ids_RT[row, visible].tolist() == list(range(len(past)))


def test_division_is_balanced_and_repeats():
    rows = [
        Row((sample(f"g{n}/0", prompt=[2] * n, completion=[3, 1]),), n + 1) for n in range(1, 33)
    ]
    divided = divide_rows(rows, ranks=2, micro_batch_tokens=64)
    loads = [sum(row.num_positions for cut in mine for row in cut) for mine in divided]
    assert abs(loads[0] - loads[1]) <= 33
    assert divide_rows(rows, ranks=2, micro_batch_tokens=64) == divided


def test_rank_without_rows_gets_weightless_ones():
    rows = pack_rows([sample("g/0", prompt=[5], completion=[6, 1])], max_row_tokens=9)
    first, second = divide_rows(rows, ranks=2, micro_batch_tokens=9)
    filler = build(second[0], weights={})
    assert len(first) == len(second) == 1
    assert filler.sample_ids == ()
    assert filler.weights_N.sum() == 0
    assert not filler.mask_N.any()


def test_completion_without_tokens_takes_no_row():
    rows = pack_rows(
        [
            sample("g/0", prompt=[5], completion=[]),
            sample("g/1", prompt=[5], completion=[6]),
        ],
        max_row_tokens=9,
    )
    assert [one.sample_id for row in rows for one in row.samples] == ["g/1"]
