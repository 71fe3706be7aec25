"""Data set `verl`: the Parquet files that verl trains on, as they are.

Fields keep the values that verl's own reader hands to reward functions, nulls included: where one
row of a file has a field that others lack, Parquet says null for those, and so does verl.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from storage.records import canonical_json
from tasks.prompts.parquet import read_values
from tasks.prompts.rows import Row, Rows, check_prompt, check_text, content_id

Files = Path | list[Path]

KEPT = ("data_source", "ability", "reward_model", "extra_info")
"""What is stored beside the prompt, for reward functions."""
REQUIRED = ("data_source", "reward_model")


class Config(BaseModel):
    """Where the files are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Files
    """verl's `train_files`: a file, a directory of them, or a list."""
    held_out_path: Files | None = None
    """verl's `val_files`; none: `held_out` rows are cut from `path`."""
    prompt_key: str = "prompt"
    """The column with the turns, as in verl."""
    keep_prompt: bool = False
    """Store the turns too, for reward functions that read them (TRL's conversational `prompts`)."""
    extra_fields: list[str] = []
    """Further columns to store for reward functions."""
    leave_out: list[str] = []
    """Fields not to store, by dotted names: `extra_info.created_at`."""


def read(config: Config) -> Rows:
    """Returns the rows of the files, in order; a row that is there twice counts once.

    Ids are `split/index` of `extra_info` if every row has its own, else the content's digest. The
    answer is the ground truth, as JSON unless it is a text.

    Raises:
        ValueError: a file is unreadable or empty, a column is missing, or a row is unusable.
    """
    held_out = config.held_out_path
    train, repeated = _read(config.path, config)
    if held_out is None:
        return Rows(train=train, dropped={"repeated": repeated})
    rows, repeated_held_out = _read(held_out, config)
    return Rows(train=train, held_out=rows, dropped={"repeated": repeated + repeated_held_out})


def _read(files: Files, config: Config) -> tuple[list[Row], int]:
    rows: dict[str, Row] = {}
    num_read = 0
    for path in files if isinstance(files, list) else [files]:
        for values, where in _values(path, config):
            row = _to_row(values, config=config, where=where)
            rows.setdefault(row.row_id, row)
            num_read += 1
    return _named(list(rows.values())), num_read - len(rows)


def _values(path: Path, config: Config) -> Iterator[tuple[dict[str, Any], str]]:
    required = [config.prompt_key, *REQUIRED, *config.extra_fields]
    hint = "Expected the columns of verl's data sets; prompt_key names the one with the turns."
    return read_values(path, required=required, optional=KEPT, hint=hint)


def _to_row(values: Mapping[str, Any], *, config: Config, where: str) -> Row:
    prompt = check_prompt(values[config.prompt_key], field=config.prompt_key, where=where)
    names = [name for name in (*KEPT, *config.extra_fields) if name in values]
    extra = {
        name: _plain(values[name], field=name, config=config, where=where)
        for name in names
        if name not in config.leave_out
    }
    if config.keep_prompt:
        extra["prompt"] = prompt
    answer = _answer(extra.get("reward_model"), where=where)
    row_id = content_id(prompt, answer, extra=extra, where=where)
    return Row(prompt=prompt, answer=answer, row_id=row_id, where=where, extra=extra)


def _answer(reward_model: Any, *, where: str) -> str | None:
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise ValueError(
            f"{where}: 'reward_model' has no 'ground_truth'. Expected one, as verl's reward "
            "managers do; null is for rows without."
        )
    truth = reward_model["ground_truth"]
    if truth is None or isinstance(truth, str):
        return truth
    return canonical_json(truth).decode("utf-8")


def _plain(value: Any, *, field: str, config: Config, where: str) -> Any:
    """Returns `value` without the fields that are left out, if JSON gives it back unchanged."""
    if isinstance(value, Mapping):
        return {
            name: _plain(item, field=f"{field}.{name}", config=config, where=where)
            for name, item in value.items()
            if f"{field}.{name}" not in config.leave_out
        }
    if isinstance(value, list):
        return [_plain(item, field=field, config=config, where=where) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(_unstorable(value, field=field, where=where))
    if isinstance(value, str):
        return check_text(value, field=field, where=where)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(_unstorable(value, field=field, where=where))


def _unstorable(value: Any, *, field: str, where: str) -> str:
    return (
        f"{where}: {field!r} is {value!r:.60} ({type(value).__name__}), which a prompt row, being "
        f"JSON, would give back as something else. Convert it, or set leave_out=['{field}'] if no "
        "reward function reads it."
    )


def _named(rows: list[Row]) -> list[Row]:
    """Returns the rows with ids that people know, if these tell them all apart."""
    names = [name for row in rows if (name := _name(row.extra.get("extra_info")))]
    if len(set(names)) < len(rows):
        return rows
    return [replace(row, row_id=name) for row, name in zip(rows, names, strict=True)]


def _name(extra_info: Any) -> str | None:
    if not isinstance(extra_info, Mapping):
        return None
    split, index = extra_info.get("split"), extra_info.get("index")
    return f"{split}/{index}" if isinstance(split, str) and isinstance(index, int | str) else None
