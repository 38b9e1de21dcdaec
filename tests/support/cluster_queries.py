"""Run queries on a cluster of two workers on this machine, in one process.

`python -m tests.support.cluster_queries FOLDER` reads a JSON list of [RUNS, SQL]. It prints a JSON
list with [ROWS, NOTES] or the text of the error for each. The configuration of Spark is written into
FOLDER.
"""

from __future__ import annotations

import decimal
import json
import os
import sys
from pathlib import Path
from typing import Any

from torchlens_perf.errors import RunStoreError
from torchlens_perf.query.spark import run_query


def _answer(runs: list[str], sql: str) -> Any:
    notes: list[str] = []
    try:
        return run_query(sql, runs, notes).rows, notes
    except RunStoreError as error:
        return str(error)


def _to_json(value: object) -> float | str:
    return float(value) if isinstance(value, decimal.Decimal) else str(value)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "spark-defaults.conf").write_text("spark.master local-cluster[2,1,1024]\n")
    os.environ["SPARK_CONF_DIR"] = str(folder)
    answers = [_answer(runs, sql) for runs, sql in json.load(sys.stdin)]
    json.dump(answers, sys.stdout, default=_to_json)
