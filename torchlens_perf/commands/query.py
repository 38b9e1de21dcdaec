"""`torchlens-perf query RUN... "SQL"`: SQL on the tables of runs, by DuckDB or Spark."""

from __future__ import annotations

import argparse
import csv
import decimal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import format_count
from torchlens_perf.commands.chosen_runs import find_newest_run, find_runs
from torchlens_perf.commands.command import Command, argument, one_of, print_note
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import printable
from torchlens_perf.run.directory import TABLES
from torchlens_perf.run.installation import require_packages

if TYPE_CHECKING:
    from torchlens_perf.query.files import Rows

_SHOWN_ROWS = 50
_NUMBERS = {int, float, decimal.Decimal, type(None)}
"""Types of numbers, which are aligned right. A null fits any type."""
_EXTRAS = {"duckdb": ("query", ["duckdb"]), "spark": ("spark", ["pyspark", "sqlglot"])}
"""The extra and the packages that each engine needs."""


def _run_query(options: argparse.Namespace) -> int:
    extra, packages = _EXTRAS[options.engine]
    require_packages("query", packages, extra)
    if options.engine == "duckdb":
        from torchlens_perf.query.engine import run_query
    else:
        from torchlens_perf.query.spark import run_query

    notes: list[str] = []
    with Progress("reading the runs", quiet=options.quiet):
        found = run_query(options.sql, _list_runs(options.runs), notes)
    if options.json:
        print(found.to_json())
    elif options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows(map(_to_csv, row) for row in (found.names, *found.rows))
    else:
        _print_table(found)
    for note in notes:
        print_note(options, printable(note))
    return 0


def _list_runs(named: list[str]) -> list[str]:
    from torchlens_perf.query.files import REMOTE

    if not named:
        return [str(find_newest_run())]
    return [
        str(run)
        for each in named
        for run in ([each] if REMOTE.match(each) else find_runs(Path(each)))
    ]


def _print_table(found: Rows) -> None:
    """Print the first rows, and the first columns if not all fit."""
    from torchlens_perf.view.specs import Column, Quantity, Table
    from torchlens_perf.view.terminal import print_lines, table_lines

    columns = [
        Column(
            name,
            [
                float(each)
                if isinstance(each, decimal.Decimal)
                else each
                if type(each) in _NUMBERS
                else str(each)
                for each in column
            ],
            Quantity.NUMBER if _NUMBERS.issuperset(map(type, column)) else Quantity.TEXT,
            optional=at,
            wraps=True,
        )
        for at, name in enumerate(found.names)
        for column in [[row[at] for row in found.rows]]
    ]
    table = Table(
        "query",
        format_count(len(found.rows), "row"),
        columns,
        hint=": --csv and --json print all",
    )
    print_lines(lambda width: table_lines(table, width, _SHOWN_ROWS), sys.stdout)


def _to_csv(value: object) -> object:
    """Return a value for CSV. Text has no control characters, and no spreadsheet computes it."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


COMMAND = Command(
    name="query",
    summary="run SQL on the tables of runs",
    description=(
        f"Run SQL on runs. Tables: {', '.join(TABLES)}, and only with DuckDB verdicts, iterations and samples. Each"
        " table has a column `run`; docs/reference/run-directory.md describes the other columns. Examples:"
        " docs/guides/queries.md."
    ),
    arguments=(
        argument(
            "runs",
            nargs="*",
            metavar="RUN",
            help="run directories, folders of runs, or s3:// addresses; default: the newest run here",
        ),
        argument("sql", help="a query in DuckDB's SQL"),
        argument(
            "--engine",
            choices=sorted(_EXTRAS),
            default="duckdb",
            help="spark: a cluster that is configured, or else this machine; default: duckdb",
        ),
        one_of(
            argument("--json", action="store_true", help="print a JSON array of objects"),
            argument("--csv", action="store_true", help="print CSV"),
        ),
    ),
    run=_run_query,
)
