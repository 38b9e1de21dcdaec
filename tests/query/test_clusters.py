"""Spark returns the numbers of DuckDB, on a cluster of two workers on this machine."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_queries import QUERIES
from tests.support.processes import ROOT, SCRIPTS
from tests.support.recorded_run import train, wait_for_sidecar
from tests.support.simulated_runs import simulate_run
from torchlens_perf.query.engine import run_query

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SPARK = os.environ.get("SPARK", "")
if not SPARK:
    pytest.skip("`make test-long` sets SPARK to an environment with Spark", allow_module_level=True)

# Sqlglot alone translates these to approximate quantiles, whole seconds or decimals.
ADAPTED = """
    SELECT rank, quantile(duration_ns, 0.3) AS a, quantile_disc(work_ns, 0.7) AS b,
        percentile_cont(0.9) WITHIN GROUP (ORDER BY own_ns) AS c,
        percentile_disc(0.2) WITHIN GROUP (ORDER BY own_ns) AS d,
        quantile_cont(epoch(time), 0.25) / epoch(max(time)) AS e,
        max(time) AS f, max(start_ns) // 7 AS g, -1.5 / sum(own_ns) AS h, '1.5' AS i
    FROM steps GROUP BY rank
"""
UNSIGNED = "SELECT DISTINCT value1, value0, depth FROM spans WHERE kind = 'collective'"
# Spark has no table of verdicts.
COMMON = [sql for _, sql in QUERIES if "verdicts" not in sql]
BOTH_RUNS = "SELECT run, count(*) AS steps, count(cpu_ns) AS measured FROM steps GROUP BY run"
INVALID = {
    "SELECT nothing FROM steps": "nothing",
    "SELEC 1": "Invalid expression",
    "SELECT sum(duration_ns * 1000000000) FROM steps": "OVERFLOW",
    "SELECT 1 / 0 FROM steps": "DIVIDE_BY_ZERO",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("clusters")
    recorded = train(folder / "recorded", {"STEPS": "60"}, script=SCRIPTS / "train_ranks.py")
    wait_for_sidecar(recorded, 60)
    # Characters that Spark expands in paths.
    simulated = simulate_run(folder / "simulated" / "a b[1]{x}%20*", ranks=4, steps=40)
    damaged = simulated.with_name("damaged")
    shutil.copytree(simulated, damaged)
    (damaged / "steps" / "vm-000999.parquet").write_bytes(b"PAR1 nothing PAR1")
    return {
        "recorded": [str(recorded.path)],
        "simulated": [str(simulated)],
        "both": [str(recorded.path), str(simulated)],
        "damaged": [str(damaged)],
    }


@pytest.fixture(scope="module")
def answers(
    runs: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Any]:
    """Return the answers of a cluster to all queries, by runs and query."""
    asked = [(of, sql) for of in ("recorded", "simulated") for sql in COMMON]
    asked += [(of, sql) for of in ("recorded", "simulated") for sql in (ADAPTED, UNSIGNED)]
    asked += [("both", BOTH_RUNS), ("damaged", BOTH_RUNS), *(("simulated", sql) for sql in INVALID)]
    done = subprocess.run(
        [f"{SPARK}/bin/python", "-m", "tests.support.cluster_queries",
         str(tmp_path_factory.mktemp("spark"))],
        input=json.dumps([(runs[of], sql) for of, sql in asked]),
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("of", ["recorded", "simulated"])
@pytest.mark.parametrize("sql", [*COMMON, ADAPTED, UNSIGNED])
def test_numbers_are_those_of_duckdb(
    of: str, sql: str, answers: dict[tuple[str, str], Any], runs: dict[str, list[str]]
) -> None:
    found = answers[of, sql]
    assert isinstance(found, list), found
    assert_same_rows(found[0], run_query(sql, runs[of], []).rows)


def test_rows_of_two_runs_are_told_apart(
    answers: dict[tuple[str, str], Any], runs: dict[str, list[str]]
) -> None:
    rows, notes = answers["both", BOTH_RUNS]
    assert not notes
    assert_same_rows(rows, run_query(BOTH_RUNS, runs["both"], []).rows)


def test_damaged_file_is_left_out_with_a_line(answers: dict[tuple[str, str], Any]) -> None:
    rows, (note,) = answers["damaged", BOTH_RUNS]
    assert rows == [["damaged", 160, 0]]
    assert "vm-000999.parquet" in note


@pytest.mark.parametrize("sql", INVALID)
def test_query_that_cannot_run_is_an_error_of_one_line(
    sql: str, answers: dict[tuple[str, str], Any]
) -> None:
    error = answers["simulated", sql]
    assert isinstance(error, str), error
    assert INVALID[sql] in error
    assert "\n" not in error


def test_command_starts_a_cluster_where_none_is_named(
    runs: dict[str, list[str]], tmp_path: Path
) -> None:
    sql = "SELECT count(*) AS n FROM steps"
    done = run_command([*runs["simulated"], sql, "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"n": 160}]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environment", "run", "message"),
    [
        ({}, "s3://bucket/run", "s3://bucket/run"),
        ({"PATH": "/nowhere", "JAVA_HOME": ""}, "", "needs Java"),
    ],
)
def test_what_spark_lacks_is_an_error(
    environment: dict[str, str],
    run: str,
    message: str,
    runs: dict[str, list[str]],
    tmp_path: Path,
) -> None:
    arguments = [run or runs["simulated"][0], "SELECT count(*) FROM steps"]
    done = run_command(arguments, tmp_path, environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def run_command(
    arguments: list[str], folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [f"{SPARK}/bin/torchlens-perf", "query", *arguments, "--engine", "spark"]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **(environment or {})},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def assert_same_rows(found: list[list[Any]], expected: list[tuple[Any, ...]]) -> None:
    """Compare rows in any order. Numbers may differ by 1e-9 of their size, sums of floats do."""
    assert len(found) == len(expected)
    for row, other in zip(sorted(found, key=sort_key), sorted(expected, key=sort_key), strict=True):
        for value, wanted in zip(row, other, strict=True):
            if isinstance(value, float):
                assert wanted is not None
                assert math.isclose(value, wanted, rel_tol=1e-9), (row, other)
            else:
                wanted = wanted if wanted is None or isinstance(wanted, int) else str(wanted)
                assert value == wanted, (row, other)


def sort_key(row: Any) -> list[str]:
    return [f"{value:.6e}" if isinstance(value, float) else str(value) for value in row]
