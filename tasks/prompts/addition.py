"""Data set `addition`: `37+48=` -> `58`, the sum of two two-digit numbers, last digit first."""

import itertools
import random

from pydantic import BaseModel, ConfigDict

from tasks.prompts.rows import Row, Rows

NUM_HELD_OUT = 800


class Config(BaseModel):
    """Nothing to choose: all 8,100 pairs, 800 of them held out."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def read(config: Config) -> Rows:
    """Returns 7,300 training pairs and 800 held-out ones; the split is the same in every run.

    The run's seed has no part in it, so that a model whose supervised start saw the training
    pairs can be evaluated by any run.
    """
    del config
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(0).shuffle(pairs)
    rows = [_row(left, right) for left, right in pairs]
    return Rows(train=rows[NUM_HELD_OUT:], held_out=rows[:NUM_HELD_OUT])


def _row(left: int, right: int) -> Row:
    # Least significant digit first: the model meets the carry before the digit that needs it.
    answer = str(left + right)[::-1]
    name = f"{left}+{right}"
    return Row(prompt=f"{name}=", answer=answer, row_id=name, where=name)
