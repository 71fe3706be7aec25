"""Data set `reasoning_gym`: generated tasks of one reasoning-gym data set.

Run as a module it is the child that generates them: JSON settings in, one JSON row per line out.
"""

import contextlib
import difflib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import reasoning_gym
from pydantic import BaseModel, ConfigDict, Field, model_validator
from reasoning_gym.factory import DATASETS

from rewards.reasoning_gym import REFUSED, check_gold
from rewards.reasoning_gym import Config as GraderConfig
from storage.records import canonical_json
from tasks.prompts.rows import Row, Rows, content_id


class Config(BaseModel):
    """Which tasks, and how many."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str
    """A name of reasoning-gym: chain_sum, count_bits, gcd, letter_counting ..."""
    size: Annotated[int, Field(gt=0)] = 1000
    """Tasks to generate; repeated ones are left out and counted."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Task i is made from seed + i, so seeds nearer than `size` share tasks: cut a held-out set
    with `held_out` instead of generating one from the next seed."""
    params: dict[str, Any] = {}
    """Settings of the data set itself (min_terms, max_words ...)."""

    @model_validator(mode="after")
    def _known(self) -> "Config":
        if self.dataset not in DATASETS:
            near = difflib.get_close_matches(self.dataset, DATASETS, n=3)
            raise ValueError(
                f"reasoning-gym has no data set {self.dataset!r}. Near: {near or sorted(DATASETS)}."
            )
        return self


def read(config: Config) -> Rows:
    """Returns the generated tasks in order, each once.

    `answer` is the stored answer (null where any valid answer counts); `extra` is the entry's
    origin, settings and metadata, for graders that ask reasoning-gym itself. Tasks whose own
    answer its verifier does not accept are left out and counted as `ungradable`, unless the reward
    refuses the whole data set.

    Raises:
        ValueError: the generator refuses the settings.
    """
    rows: dict[str, Row] = {}
    num_ungradable = 0
    for index, entry in enumerate(_generate(config)):
        where = f"reasoning-gym {config.dataset} task {index}"
        if not entry["gradable"]:
            num_ungradable += 1
            continue
        prompt, answer = entry["question"], entry["answer"]
        # Without the index: two seeds that made one task made it twice.
        row_id = content_id(prompt, answer, extra={}, where=where)
        extra = _extra(config, entry["metadata"])
        rows.setdefault(row_id, Row(prompt, answer, row_id=row_id, where=where, extra=extra))
    dropped = {"repeated": config.size - num_ungradable - len(rows)}
    if num_ungradable:
        dropped["ungradable"] = num_ungradable
    return Rows(train=list(rows.values()), dropped=dropped)


def _extra(config: Config, metadata: Any) -> dict[str, Any]:
    return {"dataset": config.dataset, "metadata": metadata, "params": config.params}


def _generate(config: Config) -> Iterator[dict[str, Any]]:
    # Some of its data sets iterate over sets of strings, whose order follows the hash seed that a
    # process gets at birth: so the tasks are made in a child that is born with a fixed one.
    child = subprocess.run(
        [sys.executable, "-m", "tasks.prompts.reasoning_gym"],
        input=config.model_dump_json(),
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if child.returncode != 0:
        cause = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"reasoning-gym could not generate {config.size} tasks of {config.dataset!r} with "
            f"{config.params}: {cause}. Check `params` against the data set's config."
        )
    return map(json.loads, child.stdout.split("\n")[:-1])


def _main() -> None:
    config = Config.model_validate_json(sys.stdin.read())
    # A few data sets draw from the global generators instead of their own.
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    entries = reasoning_gym.create_dataset(
        config.dataset, size=config.size, seed=config.seed, **config.params
    )
    out = sys.stdout
    # Some of its generators run programs that print.
    with contextlib.redirect_stdout(sys.stderr):
        lines = [_line(entries[index]) for index in range(config.size)]
        # Only now: a verifier that drew from the global generators would change later tasks.
        for line in lines:
            line["gradable"] = _is_gradable(config, line)
    out.writelines(canonical_json(line).decode() + "\n" for line in lines)


def _line(entry: dict[str, Any]) -> dict[str, Any]:
    line = {name: entry[name] for name in ("question", "answer")}
    return line | {"metadata": json.loads(json.dumps(entry["metadata"], default=str))}


def _is_gradable(config: Config, line: dict[str, Any]) -> bool:
    if config.dataset in REFUSED:
        return True
    return check_gold(line["answer"], _extra(config, line["metadata"]), GraderConfig()) is None


if __name__ == "__main__":
    _main()
