"""The table `fleet` of a folder of runs: what each ended run used and lost, by node and kind of verdict.

It is a file of JSON lines in the folder, to which runs are added when they are first asked about.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import pwd
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchlens_perf.actions.ledger import open_to_append, read_lines
from torchlens_perf.actions.nodes import is_of_machine
from torchlens_perf.errors import DAMAGED_DATA, RunStoreError, TorchlensPerfError
from torchlens_perf.query.files import Rows
from torchlens_perf.report.run_report import load_report
from torchlens_perf.store.run_folders import find_runs, open_run
from torchlens_perf.verdicts.words.report import Report

NAME = "fleet.jsonl"
COLUMNS = {
    "run": "VARCHAR", "changed_ns": "BIGINT", "ended": "VARCHAR", "user": "VARCHAR", "program": "VARCHAR",
    "framework": "VARCHAR", "nodes": "BIGINT", "node": "VARCHAR", "rank_hours": "DOUBLE",
    "kind": "VARCHAR", "lost_rank_hours": "DOUBLE",
}  # fmt: skip
"""Columns of the table. A run has a row for each node with its rank hours and without a kind, and a row
for each verdict that cost time. Its node is "" if no machine is to blame. Its framework is "none" for a
program without one, and NULL for a run that does not record it."""


def update_table(folder: Path) -> list[str]:
    """Add the runs that have ended since the last time. Return a line for each unreadable run.

    Raise OSError or RunStoreError.
    """
    problems, runs = [], find_runs(folder)
    with open_to_append(folder / NAME) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = read_lines(folder / NAME, {"run": str, "changed_ns": int})
        known = {each["run"]: each["changed_ns"] for each in lines}
        new = [each for each in runs if each.changed_ns > known.get(each.name, 0)]
        for name, changed_ns in new:
            try:
                report = load_report(open_run(folder / name), lost_time=False)
                user = _name_user((folder / name).stat().st_uid)
                about = {"run": name, "changed_ns": changed_ns, "user": user}
                rows = [] if report["run"]["live"] else list(build_rows(report, about))
            except (TorchlensPerfError, OSError, *DAMAGED_DATA) as error:
                problems.append(f"{name}: {error}")
                continue
            # One write for a run: after a crash, it is there as a whole or is read again. A line that
            # a crash has cut ends here.
            file.write("".join(f"\n{json.dumps(row)}\n" for row in rows))
            file.flush()
    return problems


def build_rows(report: Report, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of one run. about: its columns that are not in the report."""
    run, hosts = report["run"], {each["rank"]: each["host"] for each in report["ranks"]}
    ranks = Counter(hosts.values())
    about = about | {
        "ended": run["ended"], "program": run["program"] or "",
        "framework": run["settings"].get("framework"), "nodes": len(ranks), "rank_hours": 0.0,
        "kind": "", "lost_rank_hours": 0.0,
    }  # fmt: skip
    if run["started"] and run["ended"]:
        begin, end = map(datetime.datetime.fromisoformat, (run["started"], run["ended"]))
        hours = (end - begin).total_seconds() / 3600
        for node in sorted(ranks):
            yield about | {"node": node, "rank_hours": hours * ranks[node]}
    for verdict in report["verdicts"]:
        if verdict.lost_s and not verdict.traits.is_summary and not verdict.evidence.is_factor:
            named = {hosts[rank] for rank in verdict.ranks if rank in hosts}
            where = sorted(named) if is_of_machine(verdict) and named else [""]
            lost = verdict.lost_s * run["world_size"] / 3600 / len(where)
            for node in where:
                yield about | {"node": node, "kind": verdict.traits.name, "lost_rank_hours": lost}


def _name_user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def run_sql(folder: Path, statements: list[str], engine: str) -> list[Rows]:
    """Return the results of SQL on the table `fleet`, by duckdb or spark.

    Raise RunStoreError if a statement is wrong.
    """
    path = os.path.abspath(folder / NAME)
    newest = (
        "SELECT * FROM rows JOIN (SELECT run, max(changed_ns) AS changed_ns FROM rows GROUP BY run)"
        " newest USING (run, changed_ns)"
    )
    if engine == "duckdb":
        import duckdb

        with duckdb.connect() as connection:
            columns = ", ".join(f"{name}: '{kind}'" for name, kind in COLUMNS.items())
            quoted = path.replace("'", "''")
            connection.execute(
                "CREATE TABLE rows AS SELECT * FROM read_json("
                f"'{quoted}', format='newline_delimited', ignore_errors=true, columns={{{columns}}})"
            )
            connection.execute(f"CREATE VIEW fleet AS {newest}")
            try:
                results = map(connection.execute, statements)
                return [
                    Rows([column[0] for column in each.description], each.fetchall())
                    for each in results
                ]
            except duckdb.Error as error:
                raise RunStoreError(f"the query failed: {error}".splitlines()[0]) from None
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    session = SparkSession.builder.getOrCreate()
    kinds = ", ".join(
        f"{name} {kind.replace('VARCHAR', 'STRING')}" for name, kind in COLUMNS.items()
    )
    session.read.schema(kinds).json(f"file://{path}").dropna(
        subset=["run"]
    ).createOrReplaceTempView("rows")
    session.sql(newest).createOrReplaceTempView("fleet")
    try:
        frames = map(session.sql, statements)
        return [Rows(each.columns, [tuple(row) for row in each.collect()]) for each in frames]
    except PySparkException as error:
        raise RunStoreError(f"the query failed: {error}".splitlines()[0]) from None
