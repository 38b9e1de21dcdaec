"""Nodes that many jobs name are told from nodes that are named by luck, and lost hours add up."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.offenders import write_fleet
from tests.support.processes import ROOT
from tests.support.simulated_runs import simulate_run
from torchlens_perf.actions import fleet
from torchlens_perf.actions.fleet import build_rows
from torchlens_perf.actions.offenders import NodeRow, find_offenders, read_fleet, tail_chance
from torchlens_perf.commands.cli import main
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

SPARK = os.environ.get("SPARK", "")


def test_chance_is_that_of_the_binomial_distribution() -> None:
    exact = sum(math.comb(20, k) * 0.1**k * 0.9 ** (20 - k) for k in range(5, 21))
    assert tail_chance(20, 5, 0.1) == pytest.approx(exact)
    assert tail_chance(20, 0, 0.1) == tail_chance(20, 5, 1.0) == 1.0
    assert (
        0 < tail_chance(100_000, 50_000, 0.001) < 1e-300 or tail_chance(100_000, 50_000, 0.001) == 0
    )


def test_planted_offenders_are_found_and_healthy_nodes_are_not(tmp_path: Path) -> None:
    right = wrong = missed = 0
    for seed in range(3):
        bad = write_fleet(tmp_path, 2000, seed)
        found = {each.node for each in read_fleet(tmp_path, "duckdb")[0]}
        right, wrong, missed = (
            right + len(found & bad),
            wrong + len(found - bad),
            missed + len(bad - found),
        )
    assert right >= 28
    assert wrong <= 1
    assert missed <= 2


def test_fleet_without_offenders_has_none() -> None:
    chosen = random.Random(0)
    found = 0
    for _ in range(40):
        nodes = [
            NodeRow(f"n{number}", 40, sum(chosen.random() < 0.02 for _ in range(40)), 1.0, 0.0)
            for number in range(200)
        ]
        found += len(find_offenders(nodes))
    assert found <= 1


def test_offender_does_not_hide_another_one() -> None:
    nodes = [NodeRow(f"n{number}", 50, 0, 1.0, 0.0) for number in range(20)]
    nodes += [NodeRow("worst", 50, 50, 1.0, 9.0), NodeRow("bad", 50, 6, 1.0, 1.0)]
    assert [each.node for each in find_offenders(nodes)] == ["worst", "bad"]


def test_two_findings_are_never_enough() -> None:
    assert find_offenders([NodeRow("n", 2, 2, 1.0, 1.0), NodeRow("m", 1000, 0, 1.0, 0.0)]) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs on four nodes, of which three name node-0002."""
    found = tmp_path_factory.mktemp("runs")
    for seed in range(4):
        fault = ("--fault", "node:node=2,share=0.3") if seed else ()
        simulate_run(found / f"r{seed}", *fault, "--node-size", "1", ranks=4, seed=seed)
    return found


def test_table_of_real_runs_has_their_hours_and_losses(folder: Path, capsys: Any) -> None:
    assert (
        main(
            [
                "offenders",
                str(folder),
                "--sql",
                "SELECT sum(rank_hours) AS h, count(*) AS n FROM fleet",
            ]
        )
        == 0
    )
    (used,) = json.loads(capsys.readouterr().out)
    assert used["n"] == 4 * 4 + 3
    assert 0 < used["h"] < 1
    main(["offenders", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    lost = {
        each["name"]: each["lost_rank_hours"] for each in found["losses"] if each["by"] == "node"
    }
    main(["report", str(folder / "r1"), "--json"])
    (verdict, *_) = json.loads(capsys.readouterr().out)["verdicts"]
    assert list(lost) == ["node-0002"]
    assert lost["node-0002"] == pytest.approx(3 * verdict["lost_s"] * 4 / 3600, rel=0.2)


def test_hours_by_framework_tell_a_program_without_one_from_a_run_that_records_none(
    tmp_path: Path,
) -> None:
    write_fleet(tmp_path, 500, 0)
    expected = Counter[str]()
    for line in (tmp_path / fleet.NAME).read_text().splitlines():
        row = json.loads(line)
        if row["kind"]:
            expected[row.get("framework", "not recorded")] += row["lost_rank_hours"]
    found = {
        each.name: each.lost_rank_hours
        for each in read_fleet(tmp_path, "duckdb")[1]
        if each.by == "framework"
    }
    assert found == pytest.approx(expected)
    assert found.keys() == {"none", "lightning", "accelerate, transformers.trainer", "not recorded"}


def test_rows_of_a_run_have_its_framework_or_null(folder: Path) -> None:
    report = load_report(RunDirectory(folder / "r1"), lost_time=False)
    assert {row["framework"] for row in build_rows(report, {})} == {None}
    report["run"]["settings"]["framework"] = "none"
    assert {row["framework"] for row in build_rows(report, {})} == {"none"}


def test_table_gets_new_runs_only_and_changed_ones_replace_their_rows(folder: Path) -> None:
    fleet.update_table(folder)
    before = (folder / fleet.NAME).read_text()
    assert fleet.update_table(folder) == []
    assert (folder / fleet.NAME).read_text() == before
    later = time.time_ns() + 10**9
    os.utime(folder / "r0" / "nodes", ns=(later, later))
    with (folder / fleet.NAME).open("a") as file:
        file.write('{"run": "cut by a cr')
    fleet.update_table(folder)
    assert len((folder / fleet.NAME).read_text()) > len(before)
    (found,) = fleet.run_sql(folder, ["SELECT count(*) FROM fleet WHERE run = 'r0'"], "duckdb")
    assert found.rows == [(4,)]


def test_unreadable_run_is_named_and_the_others_count(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "r1").symlink_to(folder / "r1")
    (tmp_path / "broken" / "nodes").mkdir(parents=True)
    (tmp_path / "broken" / "nodes" / "n.json").write_text("{")
    main(["offenders", str(tmp_path)])
    shown = capsys.readouterr()
    assert "broken: " in shown.err
    assert "No node is named more often than luck explains" in shown.out


def test_wrong_query_is_one_line(folder: Path, capsys: Any) -> None:
    assert main(["offenders", str(folder), "--sql", "SELECT nothing FROM fleet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torchlens-perf: the query failed: Binder Error")


def test_missing_folder_is_one_line(tmp_path: Path, capsys: Any) -> None:
    assert main(["offenders", str(tmp_path / "none")]) == 2
    assert "none cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(not SPARK, reason="`make test-long` sets SPARK to an environment with Spark")
def test_spark_has_the_answers_of_duckdb(tmp_path: Path, capsys: Any) -> None:
    write_fleet(tmp_path, 2000, 0)
    main(["offenders", str(tmp_path), "--json"])
    expected = json.loads(capsys.readouterr().out)
    done = subprocess.run(
        [f"{SPARK}/bin/python", "-m", "torchlens_perf", "offenders", str(tmp_path), "--engine", "spark", "--json"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [each["node"] for each in found["offenders"]] == [
        each["node"] for each in expected["offenders"]
    ]
    for one, other in zip(found["losses"], expected["losses"], strict=True):
        assert one == pytest.approx(other)
