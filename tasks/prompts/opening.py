"""Opens a data set of the mixture by its kind, and checks its options."""

import difflib
import importlib
from typing import Any, Protocol, cast

from pydantic import BaseModel

from tasks.prompts import DATASETS
from tasks.prompts.contract import DatasetConfig, PromptsConfig
from tasks.prompts.rows import Rows, check_unique


class DatasetModule(Protocol):
    """What a file of this folder offers."""

    Config: type[BaseModel]

    def read(self, config: Any) -> Rows:
        """Returns all rows; the same config gives the same rows in every process."""
        ...


def open_module(kind: str) -> DatasetModule:
    """Returns the module of a kind.

    Raises:
        ValueError: there is no such kind; the message names near ones.
    """
    if kind not in DATASETS:
        near = difflib.get_close_matches(kind, DATASETS) or sorted(DATASETS)
        raise ValueError(f"There is no data set kind {kind!r}. Did you mean one of {near}?")
    return cast(DatasetModule, importlib.import_module(DATASETS[kind]))


def check_options(config: PromptsConfig) -> None:
    """Checks kind and options of every set of the mixture; reads no data.

    Raises:
        ValueError: a kind is unknown, or its Config refuses the options.
    """
    for dataset in config.datasets:
        open_module(dataset.kind).Config.model_validate(dataset.options)


def read_rows(dataset: DatasetConfig) -> Rows:
    """Returns the rows of one data set, ids checked.

    Raises:
        ValueError: the options or the data are unusable; says which, and where.
    """
    module = open_module(dataset.kind)
    rows = module.read(module.Config.model_validate(dataset.options))
    if rows.held_out is not None and dataset.held_out:
        raise ValueError(
            f"Data set {dataset.label!r} brings {len(rows.held_out)} held-out rows of its own and "
            f"held_out asks to cut {dataset.held_out} more. Leave held_out at 0."
        )
    check_unique(rows.train)
    check_unique(rows.held_out or [])
    return rows
