"""SQL on the Parquet files of runs, by DuckDB: one view for each table of the run directory.

The views have the columns of docs/reference/run-directory.md and the column `run`, the run's id.
Damaged files are left out. Runs may lie in an object store, whose files are not checked. A query on
local runs reads their files only, and writes none.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

import duckdb

from torchlens_perf.errors import RunStoreError
from torchlens_perf.query.files import REMOTE, Rows, list_local_files
from torchlens_perf.roles.table import QUERY_TABLES, query_rows
from torchlens_perf.run.directory import TABLES, RunDirectory

_RUN_OF_FILE = r"([^/]+)/[a-z]+/[^/]+$"
# Not the name of a column in any file.
_FILE = "_torchlens_perf_file"
_READING = {duckdb.StatementType.SELECT, duckdb.StatementType.CREATE}
"""Kinds of statements that a query may have: PIVOT creates a type. Others could overwrite a run's files."""
VERDICTS = {
    "run": "VARCHAR", "kind": "VARCHAR", "status": "VARCHAR", "rank": "BIGINT", "ranks": "BIGINT[]",
    "phase": "VARCHAR", "since_step": "BIGINT", "cost_s_per_step": "DOUBLE", "cost_share": "DOUBLE",
    "text": "VARCHAR", "next": "VARCHAR",
}  # fmt: skip
"""Columns of the table `verdicts` and their types."""


def run_query(sql: str, runs: Sequence[str], notes: list[str]) -> Rows:
    """Return the result of a query on runs.

    runs: run directories, or addresses of an object store such as s3://bucket/runs/NAME. notes:
    receives a line for each damaged file. Raise RunStoreError, with lines as
    arguments, for an invalid query.
    """
    with duckdb.connect() as connection:
        try:
            _load_object_store_support(connection, runs)
            files = [
                file for table in TABLES for file in _create_view(connection, table, runs, notes)
            ]
            _create_computed_tables(connection, sql, runs)
            _confine(connection, files)
            kinds = {each.type for each in connection.extract_statements(sql)}
            if not kinds or kinds - _READING:
                raise RunStoreError(
                    "the query failed: it is no SELECT. Example: SELECT count(*) FROM steps"
                )
            result = connection.execute(sql)
            return Rows([column[0] for column in result.description or []], result.fetchall())
        except duckdb.Error as error:
            found = {name for (name,) in connection.execute("SHOW TABLES").fetchall()} | {
                "verdicts"
            }
            raise RunStoreError(
                *f"the query failed: {error}".splitlines(),
                *notes,
                f"Tables of these runs: {', '.join(sorted(found.union(QUERY_TABLES if 'events' in found else ())))}."
                " `DESCRIBE steps` lists the columns of steps.",
            ) from None


def _create_view(
    connection: duckdb.DuckDBPyConnection, table: str, runs: Sequence[str], notes: list[str]
) -> list[str]:
    """Create the view of a table. Return its files."""
    # Files of an object store cannot be checked.
    files = [
        str(file)
        for run in runs
        for file in (
            [f"{run.rstrip('/')}/{table}/*.parquet"]
            if REMOTE.match(run)
            else list_local_files(run, table, notes)
        )
    ]
    if not files:
        return []
    listed = ", ".join(_quote(_escape_pattern(file)) for file in files)
    try:
        # Folders are not columns, even if their names are like `rank=7`.
        connection.execute(
            f"CREATE VIEW {table} AS SELECT regexp_extract({_FILE}, '{_RUN_OF_FILE}', 1) AS run,"
            f" * EXCLUDE ({_FILE}) FROM read_parquet([{listed}], union_by_name=true,"
            f" hive_partitioning=false, filename='{_FILE}')"
        )
    except duckdb.IOException:
        # An object store cannot be listed first: the run has no files of this table.
        if not any(REMOTE.match(file) for file in files):
            raise
    return files


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _escape_pattern(file: str) -> str:
    """Return a pattern that only matches this local file; an address is a pattern already."""
    return file if REMOTE.match(file) else re.sub(r"[*?\[]", lambda sign: f"[{sign[0]}]", file)


def _create_computed_tables(
    connection: duckdb.DuckDBPyConnection, sql: str, runs: Sequence[str]
) -> None:
    """Create the tables of local runs that a query names and that have the numbers of their reports."""
    named = {
        name: columns
        for name, columns in {"verdicts": VERDICTS, **QUERY_TABLES}.items()
        if name in sql.lower()
    }
    for name, columns in named.items():
        connection.execute(f"CREATE TABLE {name} ({', '.join(map(' '.join, columns.items()))})")
    for run in (RunDirectory(Path(each)) for each in runs if named and not REMOTE.match(each)):
        for name, row in itertools.chain(
            _verdict_rows(run) if "verdicts" in named else (), query_rows(run, named)
        ):
            connection.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)


def _verdict_rows(run: RunDirectory) -> list[tuple[str, list[object]]]:
    from torchlens_perf.report.run_report import load_report
    from torchlens_perf.view.headline import build_headlines

    report = load_report(run, lost_time=False)
    return [
        ("verdicts", [
            report["run"]["id"], row.kind, headline.status, row.rank, list(row.ranks), row.phase,
            row.held.since_step if row.held else row.since_step,
            row.cost_s_per_step, row.cost_share, headline.sentence, headline.action,
        ])
        for row, headline in zip(report["verdicts"], build_headlines(report), strict=True)
    ]  # fmt: skip


def _confine(connection: duckdb.DuckDBPyConnection, files: Sequence[str]) -> None:
    """Let the query read only these files, and write none. Object stores need the network."""
    connection.execute("SET python_enable_replacements=false")
    if not any(REMOTE.match(file) for file in files):
        # The pattern of a file is checked as well as the file that it matches.
        allowed = map(_quote, sorted({*files, *map(_escape_pattern, files)}))
        connection.execute(
            f"SET allowed_paths=[{', '.join(allowed)}]; SET enable_external_access=false"
        )
    connection.execute("SET lock_configuration=true")


def _load_object_store_support(connection: duckdb.DuckDBPyConnection, runs: Sequence[str]) -> None:
    """Load DuckDB's extension for object stores. Credentials come from the usual variables."""
    if not any(REMOTE.match(run) for run in runs):
        return
    try:
        import duckdb_extension_httpfs  # type: ignore[import-untyped]
    except ImportError:
        connection.execute("INSTALL httpfs")
    else:
        found = Path(duckdb_extension_httpfs.__file__).parent.glob("extensions/*/httpfs.*")
        connection.execute(f"LOAD '{next(found)}'")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    settings: dict[str, str | bool | None] = {
        "s3_access_key_id": os.environ.get("AWS_ACCESS_KEY_ID"),
        "s3_secret_access_key": os.environ.get("AWS_SECRET_ACCESS_KEY"),
        "s3_session_token": os.environ.get("AWS_SESSION_TOKEN"),
        "s3_region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
    }
    if endpoint:
        scheme, _, address = endpoint.rpartition("://")
        settings |= {
            "s3_endpoint": address.rstrip("/"),
            "s3_url_style": "path",
            "s3_use_ssl": scheme != "http",
        }
    for name, value in settings.items():
        if value is not None:
            connection.execute(f"SET {name} = ?", [value])
