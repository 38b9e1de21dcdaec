"""A query reads the files of the named runs and nothing else, whatever their names are."""

from __future__ import annotations

import csv
import io
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.simulated_runs import simulate_run
from torchlens_perf.commands.cli import main
from torchlens_perf.errors import RunStoreError
from torchlens_perf.query.engine import VERDICTS, run_query

COUNT = "SELECT run, rank, count(*) FROM steps GROUP BY ALL ORDER BY ALL"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    simulate_run(folder, ranks=2, steps=20, seed=0)
    return folder


def copy_of(made: Path, path: Path) -> Path:
    shutil.copytree(made, path)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "rank=7/lr=0.1/r", "step=3/duration_ns=1/r", "run=evil/r", "x=1/x=2/r", "exp[1]", "exp[!a]", "a*", "what?",
        "**/r", "{a,b}", "it's", 'a"b', "100%", "ä b", "-- x", "a;b", "#1",
    ],
)  # fmt: skip
def test_names_of_folders_change_nothing(name: str, made: Path, tmp_path: Path) -> None:
    run = copy_of(made, tmp_path / name)
    for other in ("exp1", "expb", "ab", "whatx", "a", "b"):
        copy_of(made, tmp_path / other)
    found = run_query(COUNT, [str(run)], [])

    assert found.rows == [(run.name, 0, 20), (run.name, 1, 20)]
    assert len(run_query("SELECT * FROM steps", [str(run)], []).names) == len(
        run_query("SELECT * FROM steps", [str(made)], []).names
    )


def foreign_file(path: Path) -> None:
    pq.write_table(pa.table({"filename": ["a"], "secret": [1]}), path)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    foreign_file(path.parent.parent / "private.parquet")
    path.symlink_to(path.parent.parent / "private.parquet")


@pytest.mark.parametrize(
    ("make", "is_left_out"),
    [
        (lambda path: path.write_bytes(b""), True),
        (lambda path: path.write_bytes(b"PAR1 but no more"), True),
        (lambda path: path.symlink_to("/dev/zero"), True),
        (fifo, True),
        (link, True),
        (foreign_file, False),
    ],
)
def test_one_strange_file_hides_no_row_of_the_others(
    make: object, is_left_out: bool, made: Path, tmp_path: Path
) -> None:
    run = copy_of(made, tmp_path / "run")
    make(run / "steps" / "zz.parquet")  # type: ignore[operator]
    notes: list[str] = []
    found = run_query(
        "SELECT count(*) FROM steps WHERE rank IS NOT NULL", [str(run), str(made)], notes
    )

    assert found.rows == [(80,)]
    assert len(notes) == is_left_out
    if is_left_out:
        assert "secret" not in run_query("SELECT * FROM steps", [str(run)], []).names


def test_table_that_is_a_link_to_a_folder_is_not_read(made: Path, tmp_path: Path) -> None:
    run = copy_of(made, tmp_path / "run")
    (run / "steps").rename(tmp_path / "elsewhere")
    (run / "steps").symlink_to(tmp_path / "elsewhere")
    notes: list[str] = []
    with pytest.raises(RunStoreError, match="steps"):
        run_query(COUNT, [str(run)], notes)
    assert notes


def test_run_that_the_user_names_by_a_link_is_read(made: Path, tmp_path: Path) -> None:
    (tmp_path / "newest").symlink_to(made)
    assert run_query(COUNT, [str(tmp_path / "newest")], []).rows[0][2] == 20


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/hostname')",
        "SELECT * FROM read_text('/etc/hostname')",
        "COPY (SELECT 42) TO '{file}'",
        "EXPORT DATABASE '{file}'",
        "ATTACH '{file}' AS other",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access=true",
        "SET allowed_paths=['/etc/hostname']",
        "SELECT * FROM 's3://bucket/x.parquet'",
        "SELECT * FROM runs",
        "SELECT * FROM glob('/etc/*')",
    ],
)
def test_query_reaches_no_other_file_variable_or_address(
    sql: str, made: Path, tmp_path: Path
) -> None:
    file = tmp_path / "written"
    with pytest.raises(RunStoreError, match="the query failed"):
        run_query(sql.format(file=file), [str(made)], [])
    assert not file.exists()


@pytest.mark.parametrize(
    "sql",
    [
        "COPY (SELECT 42) TO '{file}' (USE_TMP_FILE false)",
        "EXPLAIN ANALYZE COPY (SELECT 42) TO '{file}' (USE_TMP_FILE false)",
        "PREPARE writing AS COPY (SELECT 42) TO '{file}' (USE_TMP_FILE false); EXECUTE writing",
        "SELECT 1; ATTACH '{file}' AS other",
    ],
)
def test_query_cannot_overwrite_a_file_that_it_may_read(
    sql: str, made: Path, tmp_path: Path
) -> None:
    run = copy_of(made, tmp_path / "run")
    file = next((run / "steps").glob("*.parquet"))
    before = file.read_bytes()
    with pytest.raises(RunStoreError, match="no SELECT"):
        run_query(sql.format(file=file), [str(run)], [])
    assert file.read_bytes() == before


@pytest.mark.parametrize("sql", ["", " ", ";", "-- a comment", "/* nothing */"])
def test_empty_query_is_a_clear_error(sql: str, made: Path) -> None:
    with pytest.raises(RunStoreError, match="the query"):
        run_query(sql, [str(made)], [])


def test_csv_has_no_escape_sequence_and_no_formula(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [
        "\x1b]0;pwn\x07red",
        "=cmd|' /C calc'!A0",
        "+1",
        "-1",
        "@sum",
        "\t=1",
        "plain",
        "a\r\nb",
    ]
    literals = ", ".join(
        f"({i}, '{text.replace(chr(39), chr(39) * 2)}')" for i, text in enumerate(texts)
    )
    sql = f"SELECT t, -2 AS number FROM (VALUES {literals}) AS v(i, t) ORDER BY i"
    assert main(["query", str(made), sql, "--csv"]) == 0
    printed = capsys.readouterr().out
    rows = list(csv.reader(io.StringIO(printed)))

    assert printed.isprintable() or "\x1b" not in printed
    assert [row[0] for row in rows[1:]] == [
        "?]0;pwn?red", "'=cmd|' /C calc'!A0", "'+1", "'-1", "'@sum", "?=1", "plain", "a??b",
    ]  # fmt: skip
    assert {row[1] for row in rows[1:]} == {"-2"}


def test_table_of_verdicts_has_those_of_the_report(tmp_path: Path) -> None:
    simulate_run(
        tmp_path / "slow", "--fault", "constant:rank=1,share=0.3,phase=forward,since=50", ranks=4, steps=200,
    )  # fmt: skip
    sql = "SELECT run, status, rank, ranks, phase FROM verdicts WHERE kind = 'straggler'"
    assert run_query(sql, [str(tmp_path / "slow")], []).rows == [
        ("slow", "SLOW RANK", 1, [1], "forward")
    ]
    assert run_query("SELECT * FROM verdicts", [str(tmp_path / "slow")], []).names == list(VERDICTS)
