"""Data set `huggingface`: a data set of a hub by name, or a directory that `datasets` loads."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import datasets

from tasks.prompts.rows import FieldNames, Row, Rows


class Config(FieldNames):
    """Which data set, and which of its splits."""

    path: str
    """A name on the hub (`openai/gsm8k`), or a directory: one that `save_to_disk` wrote, or one
    with data files."""
    subset: str | None = None
    """The data set's configuration, where it has several (`main`)."""
    revision: str | None = None
    """Commit of the data set; give one, or the hub decides what a later launch reads."""
    split: str = "train"
    held_out_split: str | None = None
    """The split to evaluate on; none: `held_out` rows are cut from `split`."""


def read(config: Config) -> Rows:
    """Returns the rows of the splits, in their order.

    Raises:
        ValueError: there is no such data set or split, or a row is unusable.
    """
    held_out = config.held_out_split
    return Rows(
        train=_read_split(config.split, config=config),
        held_out=None if held_out is None else _read_split(held_out, config=config),
    )


def _read_split(split: str, *, config: Config) -> list[Row]:
    table = _open_split(split, config=config)
    names = table.column_names
    missing = [name for name in config.wanted if name not in names]
    if missing:
        raise ValueError(
            f"{config.path} split {split!r} has no column {missing[0]!r}. Found the columns "
            f"{names}. Name yours with prompt_field, answer_field, id_field and extra_fields."
        )
    wanted = cast(Iterable[dict[str, Any]], table.select_columns(config.wanted))
    rows = [
        config.to_row(values, where=f"{config.path} split {split!r} row {number}")
        for number, values in enumerate(wanted, start=1)
    ]
    if not rows:
        raise ValueError(f"{config.path} split {split!r} has no rows.")
    return rows


def _open_split(split: str, *, config: Config) -> datasets.Dataset:
    directory = Path(config.path)
    if not (directory / "dataset_dict.json").exists() and not (directory / "state.json").exists():
        return _load(split, config=config)
    saved = datasets.load_from_disk(config.path)
    if isinstance(saved, datasets.Dataset):
        if split != "train" or config.held_out_split:
            raise ValueError(
                f"{config.path} holds one split, saved without a name. Expected `split` to stay "
                "at its default and `held_out_split` to be left out; `held_out` cuts rows."
            )
        return saved
    if split not in saved:
        raise ValueError(f"{config.path} has the splits {sorted(saved)}, not {split!r}.")
    return saved[split]


def _load(split: str, *, config: Config) -> datasets.Dataset:
    try:
        return datasets.load_dataset(
            config.path, name=config.subset, split=split, revision=config.revision
        )
    except (OSError, ValueError) as error:
        # Missing network, name, subset and split arrive as a dozen classes under these two.
        raise ValueError(
            f"Data set {config.path!r} (subset {config.subset}, split {split!r}) did not open: "
            f"{type(error).__name__}: {error} Expected a directory here or a name that the hub "
            "knows. Without a network, give a directory that `save_to_disk` wrote."
        ) from error
