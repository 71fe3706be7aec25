"""The committed facts of runs by name: lazy Arrow tables, and DuckDB views over them."""

import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import duckdb
import pyarrow as pa
from duckdb import DuckDBPyConnection
from duckdb.func import PythonUDFType

from flows.lazy_scan import LazyDataset
from flows.views import SCHEMAS, VIEWS
from storage.errors import StorageError
from storage.inputs import open_input
from storage.object_store import ObjectStore
from storage.policy_tables import policies_table
from storage.records import EvalRecord, RunRecord
from storage.sample_tables import eval_samples_table, pool_table, prompts_table, samples_table
from storage.shard_tables import ShardTable
from storage.tables import (
    CommittedStep,
    evals_table,
    read_all_evals,
    read_runs,
    read_steps,
    runs_table,
    steps_table,
)
from tasks.reward.decoding import Decode, open_decoder


@dataclass
class Tables:
    """The committed facts of runs by the names of the views, each read when it is first asked.

    `tables["samples"]` is a lazy `ShardTable` (as are prompts, eval_samples and pool), the others
    are Arrow tables; `connect()` gives a DuckDB connection with the views over them.
    """

    store: ObjectStore
    runs: Sequence[str] | None
    cache: Path
    failures: list[Exception] = field(default_factory=list[Exception])
    """What went wrong in the store during a query: DuckDB passes on only the text of it."""

    @cached_property
    def run_records(self) -> list[RunRecord]:
        """The runs' records."""
        return read_runs(self.store, self.runs)

    @cached_property
    def steps(self) -> list[CommittedStep]:
        """All commits of the runs."""
        records = self.run_records
        return [step for record in records for step in read_steps(self.store, record.run)]

    @cached_property
    def evals(self) -> list[EvalRecord]:
        """All evaluations of the runs."""
        return read_all_evals(self.store, self.run_records)

    def __getitem__(self, name: str) -> pa.Table | ShardTable:
        """Returns the table below a view.

        Raises:
            KeyError: there is none of that name.
            NotFound: there is no such run.
            Corrupt: the chain of commits breaks, or a record is not what its commit names.
        """
        return _TABLES[name](self)

    def connect(self) -> DuckDBPyConnection:
        """Returns a DuckDB in memory with the views; it is the caller's, who may write files.

        Nothing is downloaded: extensions that do not come with DuckDB stay unknown.
        """
        connection = duckdb.connect()
        for name, value in _settings().items():
            connection.execute(f"set {name} = {value}")
        connection.create_function(
            "text_of", self._texts, ["VARCHAR", "INTEGER[]"], "VARCHAR", type=PythonUDFType.ARROW
        )
        for name, statement in VIEWS.items():
            dataset = LazyDataset(
                SCHEMAS[name], open_table=partial(self.__getitem__, name), failures=self.failures
            )
            connection.register(f"stored_{name}", dataset)
            connection.execute(f"create view {name} as {statement}")
        return connection

    def _texts(self, runs: pa.ChunkedArray, token_ids: pa.ChunkedArray) -> pa.Array:
        """What `text_of(run, token ids)` gives: the text with special tokens, or null."""
        rows = zip(runs.to_pylist(), token_ids.to_pylist(), strict=True)
        try:
            texts = [self._decoders[run](ids) if ids is not None else None for run, ids in rows]
        except (StorageError, ValueError) as error:
            self.failures.append(error)
            raise
        return pa.array(texts, pa.string())

    @cached_property
    def _decoders(self) -> "_Decoders":
        return _Decoders(self)


class _Decoders(dict[str, Decode]):
    """The function from token ids to text by run, opened when a run's text is first asked."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self._tables = tables

    def __missing__(self, run: str) -> Decode:
        tables = self._tables
        record = next(found for found in tables.run_records if found.run == run)
        self[run] = open_decoder(open_input(tables.store, record.model, cache=tables.cache))
        return self[run]


_TABLES: dict[str, Callable[[Tables], pa.Table | ShardTable]] = {
    "samples": lambda tables: samples_table(tables.store, tables.steps),
    "steps": lambda tables: steps_table(tables.store, tables.steps),
    "prompts": lambda tables: prompts_table(tables.store, tables.steps),
    "policies": lambda tables: policies_table(tables.store, tables.steps),
    "evals": lambda tables: evals_table(tables.evals),
    "eval_samples": lambda tables: eval_samples_table(
        tables.store, tables.run_records, tables.evals
    ),
    "pool": lambda tables: pool_table(tables.store, tables.run_records),
    "runs": lambda tables: runs_table(tables.run_records),
}


def _settings() -> dict[str, str]:
    spill = Path(tempfile.gettempdir()) / f"rollbook-sql-{uuid.uuid4().hex}"
    return {
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        # A name in a query means a view, never a variable of the Python that asks.
        "python_enable_replacements": "false",
        "enable_progress_bar": "false",
        "temp_directory": "'" + str(spill).replace("'", "''") + "'",
    }
