"""Questions to committed steps in SQL: `rollbook sql` and its Python entry points.

Answers come from ranges of shards, whose digests are not checked: `rollbook verify` is for that.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import duckdb
import pyarrow as pa
from duckdb import DuckDBPyConnection, StatementType

from flows.stores import resolve_store
from flows.tables import Tables
from flows.views import VIEWS
from infra.home import home
from storage.backends.memory import open_memory
from storage.object_store import ObjectStore
from storage.opening import open_store
from storage.store_config import StoreConfig

T = TypeVar("T")

BATCH_ROWS = 10_000
_READING = (StatementType.SELECT, StatementType.EXPLAIN, StatementType.MULTI)
"""MULTI is a PIVOT, which DuckDB writes as several statements."""
_NO_STORE = open_memory(StoreConfig(uri="memory://no-store"))
_NO_COLUMN = re.compile(r"column.*not found|not have a column", re.IGNORECASE)
_LOCKED = {"enable_external_access": "false", "lock_configuration": "true"}


def query(
    sql: str,
    *,
    store: ObjectStore | str | None = None,
    endpoint: str | None = None,
    run: str | Sequence[str] | None = None,
) -> pa.Table:
    """Returns the answer to one SELECT over the views of `flows/QUERIES.md`, as an Arrow table.

    Only what the query asks for is read: the columns it names, of the steps that it is about.
    Nothing is written.

    Args:
        sql: one statement that reads.
        store: an opened store or its address; None is the default one, as for `rollbook`.
        endpoint: address of an S3 server that is not AWS.
        run: only this run, or these; None takes all runs of the store.

    Raises:
        ValueError: no reading statement, or one that does not hold (an unknown column).
        NotFound: there is no such run, or a shard is gone.
        Corrupt: the chain of commits breaks, or a record is not what its commit names.
    """
    tables = open_tables(store=store, endpoint=endpoint, run=run)
    return answer(tables, sql).read_all()


def open_tables(
    *,
    store: ObjectStore | str | None = None,
    endpoint: str | None = None,
    run: str | Sequence[str] | None = None,
) -> Tables:
    """Returns the tables of a store, of which nothing is read yet; arguments as for `query`."""
    opened = (
        open_store(resolve_store(store, endpoint), writing=False)
        if store is None or isinstance(store, str)
        else store
    )
    runs = [run] if isinstance(run, str) else run
    return Tables(opened, runs=runs, cache=home() / "cache")


def answer(tables: Tables, sql: str) -> pa.RecordBatchReader:
    """Yields the answer to one statement that reads; errors as for `query`.

    Nothing that the statement says can write a file, reach the network or change a setting.
    """
    connection = tables.connect()
    for name, value in _LOCKED.items():
        connection.execute(f"set {name} = {value}")
    _check_reads(connection, sql)
    tables.failures.clear()
    try:
        reader = _interruptible(connection, lambda: connection.sql(sql).to_arrow_reader(BATCH_ROWS))
    except (duckdb.Error, RuntimeError) as error:
        raise _cause(error, sql, tables, connection) from error
    rows = _batches(reader, connection, lambda error: _cause(error, sql, tables, connection))
    return pa.RecordBatchReader.from_batches(reader.schema, rows)


def view_columns() -> dict[str, list[str]]:
    """Returns the columns of every view; no store is needed."""
    connection = Tables(_NO_STORE, runs=[], cache=home()).connect()
    return {name: connection.table(name).columns for name in VIEWS}


def _batches(
    reader: pa.RecordBatchReader,
    connection: DuckDBPyConnection,
    cause: Callable[[Exception], BaseException],
) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            batch = _interruptible(connection, lambda: next(reader, None))
        except (duckdb.Error, RuntimeError, OSError, pa.ArrowException) as error:
            raise cause(error) from error
        if batch is None:
            return
        yield batch


def _interruptible(connection: DuckDBPyConnection, call: Callable[[], T]) -> T:
    """Returns what `call` returns, so that Ctrl-C ends it at once.

    On a thread of its own: while DuckDB's threads have all the work, the one that called waits for
    them and looks at no signal (seen with DuckDB 2.0 on a busy machine).
    """
    with ThreadPoolExecutor(1, thread_name_prefix="query") as thread:
        running = thread.submit(call)
        try:
            return running.result()
        except KeyboardInterrupt:
            while not running.done():
                # Again and again: one that comes before the query has begun is forgotten.
                connection.interrupt()
                wait([running], timeout=0.1)
            raise


def _check_reads(connection: DuckDBPyConnection, sql: str) -> None:
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise ValueError("\n".join(_lines(error))) from error
    kinds = [statement.type for statement in statements]
    if len(kinds) != 1:
        raise ValueError(
            f"The query has {len(kinds)} statements. Expected one, like "
            '"select step, reward_mean from steps".'
        )
    if kinds[0] not in _READING:
        raise ValueError(
            f"{kinds[0].name} is refused: `rollbook sql` only reads. Expected a SELECT (WITH, "
            "FROM, PIVOT, DESCRIBE, SUMMARIZE and EXPLAIN read too). To keep an answer, take --csv "
            "or --json, or `from flows.query import query`."
        )


def _cause(
    error: Exception, sql: str, tables: Tables, connection: DuckDBPyConnection
) -> BaseException:
    """Returns what a person should read: the store's own error, or DuckDB's with what there is."""
    if tables.failures:
        return tables.failures[0]
    if "interrupted" in str(error).lower():
        return KeyboardInterrupt()
    first, *others = _lines(error)
    more: list[str] = []
    if isinstance(error, duckdb.PermissionException):
        more = ["`rollbook sql` reads the views of the store and nothing else."]
    elif isinstance(error, duckdb.CatalogException) and "extension" in first:
        more, others = ["`rollbook sql` loads no extensions."], []
    elif isinstance(error, duckdb.CatalogException) and first.startswith("Table with"):
        more = [f"Expected one of the views {', '.join(VIEWS)}."]
    elif isinstance(error, duckdb.BinderException) and _NO_COLUMN.search(first):
        words = set(re.findall(r"\w+", sql.lower()))
        named = [name for name in VIEWS if name in words]
        more = [f"{name} has {', '.join(connection.table(name).columns)}." for name in named]
    return ValueError("\n".join([" ".join([first, *more]), *others]))


def _lines(error: Exception) -> list[str]:
    """Returns DuckDB's message: what is wrong with its hint first, then where in the query."""
    text = str(error).partition(": ")[2].strip() or str(error)
    first, *others = [line for line in text.splitlines() if line.strip()]
    first = first.rstrip("!.") + "."
    if others and others[0].startswith(("Candidate bindings", "Did you mean")):
        hint = others.pop(0).replace(": :", ":")
        first += f" {hint}" if hint.endswith("?") else f" {hint}."
    return [first, *others]
