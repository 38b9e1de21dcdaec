"""The report on processes that make several trainings one after the other covers one of them."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.support.processes import wait_for_sidecar
from tests.support.reports import checked
from tests.support.tables import mixed_table
from tests.support.warm_python import run
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.report.build import build_report
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.run.records import StepTable
from torchlens_perf.run.ring import Flag, record_dtype
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.node_state import MAX_TRAININGS, NodeState, ProcessState
from torchlens_perf.view.step_words import step_count_text
from torchlens_perf.view.training_table import build_training_table

COMPUTING = {"forward": 4.0, "backward": 8.0, "optimizer": 1.0}
SLOW_DATA = {"data": 40.0, **COMPUTING}
FAST = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5}
# Slow data in the second of three trainings.
TRIALS = ((60, COMPUTING), (60, SLOW_DATA), (60, FAST))


def table_of(trainings: Any, first_step: int = 1) -> StepTable:
    """Return the steps of trainings, each with its number of steps and their parts in ms."""
    steps = [
        {**parts, "flags": int(Flag.NEW_TRAINING) if number and not step else 0}
        for number, (count, parts) in enumerate(trainings)
        for step in range(count)
    ]
    return mixed_table(steps, first_step)


def process_of(
    trainings: Any, rank: int = 0, ranks: int = 1, pieces: int = 1, **changed: Any
) -> ProcessState:
    """Return a process whose steps were added in so many pieces."""
    identity = Identity(
        "r", rank, rank, ranks, ranks, 0, "h", 10 + rank, 1, 1, False, "train.py", "", {}
    )
    firsts = [1, *itertools.accumulate((count for count, _ in trainings[:-1]), initial=1)][1:]
    names = [(first, f"Net{number}") for number, first in enumerate(firsts)]
    process = ProcessState(
        identity,
        Anchor(0, 0, 0),
        RankStatistics(),
        ended="closed",
        facts=RankFacts(trainings=names),
        **changed,
    )
    table, nothing = table_of(trainings), np.zeros(0, record_dtype())
    for part in np.array_split(np.arange(len(table)), pieces):
        process.add_records(nothing, table.select_rows(part), [], 0)
    return process


def report_on(*processes: ProcessState) -> Any:
    return checked(
        build_report("r", [NodeState("h", {each.identity.key: each for each in processes})])
    )


@pytest.mark.parametrize("pieces", [1, 7, 180])
def test_each_training_has_its_own_typical_step_and_verdict(pieces: int) -> None:
    report = report_on(process_of(TRIALS, pieces=pieces))

    rows = report["trainings"]
    assert [(each["first_step"], each["last_step"]) for each in rows] == [
        (1, 60),
        (61, 120),
        (121, 180),
    ]
    assert [each["typical_s"] for each in rows] == pytest.approx([0.013, 0.053, 0.0035])
    assert [each["total_s"] for each in rows] == pytest.approx([0.78, 3.18, 0.21])
    assert [each["model"] for each in rows] == ["Net0", "Net1", "Net2"]
    assert [each["is_shown"] for each in rows] == [False, True, False]
    assert [each["verdict"].kind for each in rows] == [
        "compute_bound",
        "data_bound",
        "compute_bound",
    ]


def test_report_covers_the_training_that_takes_the_most_time() -> None:
    report = report_on(process_of(TRIALS))

    assert report["steps"]["count"] == report["ranks"][0]["steps"] == 60
    assert report["ranks"][0]["typical"]["s"] == pytest.approx(0.053)
    assert report["ranks"][0]["first_step"] == 61
    assert report["verdicts"][0].kind == "data_bound"
    assert report["history"]["median_s"] == pytest.approx(
        [0.053] * len(report["history"]["median_s"])
    )
    assert step_count_text(report) == "60 steps of training 2 of 3"


def test_table_shows_each_training() -> None:
    table = build_training_table(cast("Any", report_on(process_of(TRIALS))))

    assert table is not None
    columns = {each.title: list(each.values) for each in table.columns}
    assert columns["training"] == ["1", "2", "3"]
    assert "data loading" in str(columns["verdict"][1])
    assert "training 2" in table.note


def test_several_ranks_agree() -> None:
    ranks = [process_of(TRIALS, rank, 2) for rank in range(2)]
    assert len(report_on(*ranks)["trainings"]) == 3

    other = process_of(((180, COMPUTING),), 1, 2)
    assert report_on(ranks[0], other)["trainings"] == []


def test_trainings_that_were_taken_back_are_one() -> None:
    process = process_of(TRIALS)
    process.facts.trainings = []
    report = report_on(process)

    assert report["trainings"] == []
    assert report["steps"]["count"] == 180
    assert step_count_text(report) == "180 steps"


def test_statistics_of_the_shortest_of_many_trainings_are_dropped() -> None:
    many = [(20 + 10 * number, COMPUTING) for number in range(MAX_TRAININGS + 2)]
    process = process_of(many)
    rows = report_on(process)["trainings"]

    assert [each["steps"] for each in rows] == [count for count, _ in many]
    assert [each["verdict"] is None for each in rows] == [True] * 2 + [False] * MAX_TRAININGS


def test_state_of_a_process_with_trainings_is_saved(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    directory.create()
    process = process_of(TRIALS)
    NodeState("h", {process.identity.key: process}).save(directory)
    loaded = node_state.load(directory.node_state_path("h"))

    (again,) = loaded.processes.values()
    assert report_on(again)["trainings"] == report_on(process)["trainings"]


PROGRAM = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x)

class Large(Small):
    pass

def trial(kind):
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

for kind in (Small, Large, Small):
    trial(kind)
"""


def test_search_over_models_has_a_training_for_each(tmp_path: Path) -> None:
    """The watch is started by the environment, and the report is on the screen at the end."""
    script = tmp_path / "search.py"
    script.write_text(PROGRAM)
    environment = {
        "TORCHLENS_PERF": "1",
        "TORCHLENS_PERF_DIR": str(tmp_path / "runs"),
        "TORCHLENS_PERF_REPORT": "page",
    }
    done = run([sys.executable, str(script)], 120, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr

    (folder,) = (tmp_path / "runs").iterdir()
    wait_for_sidecar(RunDirectory(folder))
    report = load_report(RunDirectory(folder))
    assert [each["model"] for each in report["trainings"]] == ["Small", "Large", "Small"]
    assert sum(each["steps"] for each in report["trainings"]) == 119
    assert "of 3" in done.stderr
    assert "Trainings of this process" in (folder / "report.html").read_text()
