"""The learning rate is a function of config and update index."""

import pytest

from tasks.train.contract import TrainConfig
from tasks.train.schedule import learning_rate


def rates(count: int, **fields) -> list[float]:
    config = TrainConfig(learning_rate=1.0, **fields)
    return [learning_rate(config, index) for index in range(count)]


def test_warm_up_rises_to_the_full_rate():
    assert rates(6, warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_schedule_falls_to_zero_and_stays():
    expected = [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert rates(8, warmup_updates=2, schedule="linear", schedule_updates=6) == expected


def test_cosine_schedule_is_half_way_in_the_middle():
    found = rates(5, schedule="cosine", schedule_updates=4)
    assert found[0] == 1.0
    assert found[2] == pytest.approx(0.5)
    assert found[4] == pytest.approx(0.0)


def test_a_schedule_keeps_its_floor():
    # From 1 to 0.2 in four updates: 0.2 a quarter.
    found = rates(7, schedule="linear", schedule_updates=4, schedule_floor=0.2)
    assert found == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
