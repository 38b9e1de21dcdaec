"""SQL on the Parquet files of runs, by Spark, on a cluster or on this machine.

The SQL is DuckDB's. All machines of the cluster must find the runs under the same paths.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlglot
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession, functions
from sqlglot import ErrorLevel, exp
from sqlglot.errors import SqlglotError

from torchlens_perf.errors import RunStoreError
from torchlens_perf.query.files import REMOTE, Rows, list_local_files
from torchlens_perf.run.directory import TABLES
from torchlens_perf.run.installation import NAME

_SETTINGS = {
    # Without ANSI mode, a sum that overflows is wrong and a division by zero is null.
    "spark.sql.ansi.enabled": "true",
    # Spark has no times in nanoseconds.
    "spark.sql.legacy.parquet.nanosAsLong": "true",
    "spark.sql.parquet.mergeSchema": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def run_query(sql: str, runs: Sequence[str], notes: list[str]) -> Rows:
    """Return the result of a query on runs.

    runs: run directories. notes: receives a line for each damaged file. Raise RunStoreError for an
    invalid query, a run in an object store, or missing Java.
    """
    if remote := next(filter(REMOTE.match, runs), None):
        raise RunStoreError(f"{remote}: --engine spark reads local runs only; use duckdb")
    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        raise RunStoreError("--engine spark needs Java 17: install it, or set JAVA_HOME")
    try:
        statements = _translate(sql)
        # The master is that of spark-defaults.conf, or else this machine.
        session = SparkSession.builder.appName(NAME).config(map=_SETTINGS).getOrCreate()
        for table in TABLES:
            if table in sql.lower():
                _create_view(session, table, runs, notes)
        found = [session.sql(statement) for statement in statements or [""]][-1]
        return Rows(found.columns, [tuple(map(_to_python, row)) for row in found.collect()])
    except (SqlglotError, PySparkException, Py4JError, ConnectionError) as error:
        raise RunStoreError(f"the query failed: {_first_cause(error)}") from None


def _first_cause(error: Exception) -> str:
    """Return the first line of the first Java error that led to this error."""
    java = getattr(error, "java_exception", None)
    while java is not None and java.getCause() is not None:
        java = java.getCause()
    text = str(error) if java is None else str(java.getMessage())
    return text.strip().splitlines()[0]


def _translate(sql: str) -> list[str]:
    """Return statements in Spark's SQL, with the exact quantiles and times of DuckDB."""
    statements = sqlglot.parse(sql, "duckdb")
    for node in [node for each in statements if each for node in each.find_all(exp.Expression)]:
        value, share = node.this, node.args.get("quantile") or node.args.get("expression")
        if isinstance(node, (exp.PercentileCont, exp.PercentileDisc, exp.Quantile)):
            kind = "CONT" if isinstance(node, exp.PercentileCont) else "DISC"
            exact = exp.Anonymous(this=f"PERCENTILE_{kind}", expressions=[share or value])
            order = exp.Order(expressions=[exp.Ordered(this=value)])
            node.replace(exp.WithinGroup(this=exact, expression=order) if share else exact)
        elif isinstance(node, exp.TimeToUnix):
            micros = exp.Anonymous(this="UNIX_MICROS", expressions=[value])
            node.replace(exp.Paren(this=micros / exp.Literal.number("1e6")))
        elif isinstance(node, exp.Anonymous) and node.name.lower() == "epoch_us":
            node.set("this", "UNIX_MICROS")
        elif isinstance(node, exp.Literal) and node.is_number and "." in value:
            # Spark rounds quotients of decimals such as 1.5 to a few digits. 1.5e0 is a double.
            node.set("this", value if "e" in value.lower() else f"{value}e0")
    return [each.sql("spark", unsupported_level=ErrorLevel.RAISE) for each in statements if each]


def _create_view(session: SparkSession, table: str, runs: Sequence[str], notes: list[str]) -> None:
    frames = []
    for run in runs:
        # Spark expands patterns in paths.
        paths = [
            "file://" + re.sub(r"([][{}*?\\])", r"\\\1", str(path.absolute()))
            for path in list_local_files(run, table, notes)
        ]
        if paths:
            time = functions.expr("timestamp_micros(time div 1000)")
            name = functions.lit(Path(run).absolute().name).alias("run")
            frames.append(session.read.parquet(*paths).withColumn("time", time).select(name, "*"))
    if frames:
        union = functools.reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
        union.createOrReplaceTempView(table)


def _to_python(value: Any) -> Any:
    """Return unsigned 64-bit integers as integers, and times with their zone, as DuckDB does."""
    if isinstance(value, decimal.Decimal) and value.as_tuple().exponent == 0:
        return int(value)
    return value.astimezone() if isinstance(value, datetime.datetime) else value
