"""Data set `first_letter`: name the first letter of a word, after one example."""

import random

import reasoning_gym
from pydantic import BaseModel, ConfigDict

from tasks.prompts.rows import Message, Row, Rows

NUM_HELD_OUT = 200
SHOT_WORD = "know"


class Config(BaseModel):
    """Nothing to choose: 686 words, 200 of them held out."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def read(config: Config) -> Rows:
    """Returns 486 training words and 200 held-out ones; the split is the same in every run."""
    del config
    words = _words()
    random.Random(0).shuffle(words)
    rows = [_row(word) for word in words]
    return Rows(train=rows[NUM_HELD_OUT:], held_out=rows[:NUM_HELD_OUT])


def _words() -> list[str]:
    """Returns the words of reasoning-gym's own text, sorted, without the one that the shot uses."""
    entries = reasoning_gym.create_dataset(
        "letter_counting", size=4000, seed=1, min_words=1, max_words=1
    )
    words = {entry["metadata"]["span"][0].lower() for entry in entries}
    return sorted(
        word for word in words if word.isalpha() and 3 <= len(word) <= 7 and word != SHOT_WORD
    )


def _row(word: str) -> Row:
    turns: list[Message] = [
        # Empty, because some templates put a system turn of their own where none is given.
        {"role": "system", "content": ""},
        {"role": "user", "content": _question(SHOT_WORD)},
        {"role": "assistant", "content": f"<answer>{SHOT_WORD[0]}</answer>"},
        {"role": "user", "content": _question(word)},
    ]
    return Row(prompt=turns, answer=word[0], row_id=word, where=f"the word {word!r}")


def _question(word: str) -> str:
    return f'What is the first letter of "{word}"?'
