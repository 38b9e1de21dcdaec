"""SQL on the Parquet files of runs, by DuckDB: one view for each table of the run directory.

The views have the columns of docs/reference/run-directory.md and the column `run`, the run's id.
Damaged files are left out. Runs may lie in an object store, whose files are not checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import duckdb

from torchlens_perf.errors import RunStoreError
from torchlens_perf.query.files import REMOTE, Rows, list_local_files
from torchlens_perf.run.directory import TABLES

_RUN_OF_FILE = r"([^/]+)/[a-z]+/[^/]+$"


def run_query(sql: str, runs: Sequence[str], notes: list[str]) -> Rows:
    """Return the result of a query on runs.

    runs: run directories, or addresses of an object store such as s3://bucket/runs/NAME. notes:
    receives a line for each damaged file. Raise RunStoreError for an invalid query.
    """
    with duckdb.connect() as connection:
        try:
            _load_object_store_support(connection, runs)
            for table in TABLES:
                _create_view(connection, table, runs, notes)
            result = connection.execute(sql)
            names = [column[0] for column in result.description or []]
            return Rows(names, result.fetchall())
        except duckdb.Error as error:
            raise RunStoreError(f"the query failed: {error}") from None


def _create_view(
    connection: duckdb.DuckDBPyConnection, table: str, runs: Sequence[str], notes: list[str]
) -> None:
    files = [file for run in runs for file in _list_files(run, table, notes)]
    if not files:
        return
    listed = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
    try:
        connection.execute(
            f"CREATE VIEW {table} AS SELECT regexp_extract(filename, '{_RUN_OF_FILE}', 1) AS run,"
            f" * EXCLUDE (filename) FROM read_parquet([{listed}], union_by_name=true, filename=true)"
        )
    except duckdb.IOException:
        # An object store cannot be listed first: the run has no files of this table.
        if not any(REMOTE.match(file) for file in files):
            raise


def _list_files(run: str, table: str, notes: list[str]) -> Iterator[str]:
    """Yield the files of a table, without damaged ones."""
    if REMOTE.match(run):
        yield f"{run.rstrip('/')}/{table}/*.parquet"
        return
    yield from map(str, list_local_files(run, table, notes))


def _load_object_store_support(connection: duckdb.DuckDBPyConnection, runs: Sequence[str]) -> None:
    """Load DuckDB's extension for object stores. Credentials come from the usual variables."""
    if not any(REMOTE.match(run) for run in runs):
        return
    try:
        import duckdb_extension_httpfs  # type: ignore[import-untyped]
    except ImportError:
        connection.execute("INSTALL httpfs")
    else:
        folder = Path(duckdb_extension_httpfs.__file__).parent / "extensions"
        (extension,) = folder.glob("*/httpfs.duckdb_extension")
        connection.execute(f"LOAD '{extension}'")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    settings: dict[str, str | bool | None] = {
        "s3_access_key_id": os.environ.get("AWS_ACCESS_KEY_ID"),
        "s3_secret_access_key": os.environ.get("AWS_SECRET_ACCESS_KEY"),
        "s3_session_token": os.environ.get("AWS_SESSION_TOKEN"),
        "s3_region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
    }
    if endpoint:
        scheme, _, address = endpoint.rpartition("://")
        settings |= {"s3_endpoint": address.rstrip("/"), "s3_url_style": "path"}
        settings["s3_use_ssl"] = scheme != "http"
    for name, value in settings.items():
        if value is not None:
            connection.execute(f"SET {name} = ?", [value])
