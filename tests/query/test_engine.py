"""SQL on run directories returns what the Parquet files hold."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.support.simulated_runs import simulate_run
from torchlens_perf.commands.cli import main
from torchlens_perf.errors import RunStoreError
from torchlens_perf.query.engine import run_query
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store.reader import ParquetFolder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("queried")
    for number in range(2):
        simulate_run(folder / f"run-{number}", ranks=2, steps=20, seed=number)
    return folder


def test_sum_over_steps_is_that_of_the_files(runs: Path) -> None:
    run = RunDirectory(runs / "run-0")
    tables = ParquetFolder(run.steps).read_each(lambda file: file.read_table(["duration_ns"]))
    expected = sum(sum(table.column("duration_ns").to_pylist()) for table in tables)
    found = run_query("SELECT sum(duration_ns), count(*) FROM steps", [str(run.path)], [])
    assert found.rows == [(expected, 40)]


def test_runs_are_told_apart_by_their_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT run, count(DISTINCT rank) AS ranks FROM steps GROUP BY run ORDER BY run"
    assert main(["query", str(runs), sql, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == [{"run": "run-0", "ranks": 2}, {"run": "run-1", "ranks": 2}]


def test_text_and_csv_have_the_same_values(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT rank, count(*) AS steps FROM steps GROUP BY rank ORDER BY rank"
    run = str(runs / "run-0")
    assert main(["query", run, sql]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert [line.split() for line in lines[1:4]] == [["rank", "steps"], ["0", "20"], ["1", "20"]]
    assert main(["query", run, sql, "--csv"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows == [["rank", "steps"], ["0", "20"], ["1", "20"]]


def test_text_is_aligned_left_and_numbers_right(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sql = (
        "SELECT * FROM (VALUES ('a', 7, true, 1.25), ('name', NULL, false, 20.25)) AS t(n, v, b, d)"
    )
    assert main(["query", str(runs / "run-0"), sql]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  n     v  b         d",
        "  a     7  True   1.25",
        "  name  -  False  20.2",
    ]


def test_wide_table_is_cut_to_the_width_with_a_hint(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long text is wrapped and needs little room."""
    numbers = ", ".join(f"{10**9 + at} AS c{at}" for at in range(30))
    sql = f"SELECT repeat('word ', 40) AS words, {numbers} FROM range(60)"
    assert main(["query", str(runs / "run-0"), sql]) == 0
    *table, hint = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 118
    assert table[1].split() == ["words", *(f"c{at}" for at in range(6))]
    assert hint == "  10 rows not shown, 24 more columns: --csv and --json print all"


def test_value_that_is_not_finite_is_null_in_json(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["query", str(runs / "run-0"), "SELECT 'nan'::DOUBLE AS a, 1.5 AS b", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out) == [{"a": None, "b": 1.5}]


def test_memory_of_a_simulated_run_is_null_because_it_was_not_measured(runs: Path) -> None:
    sql = "SELECT count(*), count(memory_bytes) FROM steps"
    assert run_query(sql, [str(runs / "run-0")], []).rows == [(40, 0)]


def test_damaged_file_is_left_out_with_a_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "run-0", run)
    (run / "steps" / "vm-000999.parquet").write_bytes(b"PAR1 nothing PAR1")
    assert main(["query", str(run), "SELECT count(*) AS n FROM steps", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [{"n": 40}]
    assert "vm-000999.parquet" in captured.err


def test_error_on_a_table_names_its_damaged_files(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "run-0", run)
    for file in (run / "steps").iterdir():
        file.write_bytes(b"PAR1 nothing PAR1")
    assert main(["query", str(run), "SELECT count(*) AS n FROM steps"]) == 2
    assert f"{file.name} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sql", "message"),
    [("SELECT nothing FROM steps", "nothing"), ("SELEC 1", "syntax error")],
)
def test_invalid_query_is_an_error_with_the_reason(sql: str, message: str, runs: Path) -> None:
    with pytest.raises(RunStoreError, match=message):
        run_query(sql, [str(runs / "run-0")], [])


@pytest.mark.parametrize("sql", ["SELECT nothing FROM steps", "SELECT 1 FROM nothing"])
def test_error_on_an_unknown_name_keeps_its_lines_and_lists_the_tables(
    sql: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["query", str(runs / "run-0"), sql]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"LINE 1: {sql}" in lines
    assert any(line.strip() == "^" for line in lines)
    assert lines[-1].startswith("Tables of these runs: ")
    assert "spans, steps, verdicts" in lines[-1]


def test_verdict_has_the_first_step_that_the_report_has(tmp_path: Path) -> None:
    """Also a bottleneck, which has no step of its own but that of its period."""
    waits = (f"--fault=constant:rank={rank},share=1,phase=data" for rank in range(2))
    run = simulate_run(tmp_path / "run", *waits, ranks=2, steps=100)
    rows = run_query("SELECT since_step FROM verdicts WHERE kind = 'data_bound'", [str(run)], [])
    (verdict,) = (
        row for row in load_report(RunDirectory(run))["verdicts"] if row.kind == "data_bound"
    )
    assert verdict.held is not None
    assert rows.rows == [(verdict.held.since_step,)] != [(None,)]


def test_folder_without_runs_ends_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["query", str(tmp_path), "SELECT 1"]) == 2
    assert "nor a folder of runs" in capsys.readouterr().err


@pytest.fixture(scope="module")
def bucket(runs: Path) -> Iterator[str]:
    """Return the address of a run in a bucket of an S3 server on loopback."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="runs")
        for path in (runs / "run-0").glob("*/*.parquet"):
            client.upload_file(str(path), "runs", str(path.relative_to(runs)))
        yield "s3://runs/run-0"
    server.stop()


def test_run_in_an_object_store_has_the_same_rows(runs: Path, bucket: str) -> None:
    sql = "SELECT run, rank, sum(duration_ns) FROM spans WHERE kind = 'forward' GROUP BY ALL"
    local = run_query(f"{sql} ORDER BY rank", [str(runs / "run-0")], [])
    assert len(local.rows) == 2
    assert run_query(f"{sql} ORDER BY rank", [bucket], []) == local


def test_missing_bucket_is_an_error_with_the_reason(bucket: str) -> None:
    with pytest.raises(RunStoreError, match="steps"):
        run_query("SELECT count(*) FROM steps", ["s3://other/run-0"], [])
