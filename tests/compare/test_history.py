"""The history of a job names the run from which its step changed, and only that run."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.simulated_runs import simulate_run
from torchlens_perf.commands.cli import main
from torchlens_perf.compare import history_screens
from torchlens_perf.compare.comparison import ComparedRun, read_compared_run
from torchlens_perf.compare.history import History, find_history_changes
from torchlens_perf.compare.measures import STEP


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ComparedRun:
    return read_compared_run(simulate_run(tmp_path_factory.mktemp("history") / "run"))


def runs_of(run: ComparedRun, factors: list[float], noise: float, seed: int) -> list[ComparedRun]:
    """Return copies of a run whose values are multiplied by factors and noise."""
    generator = np.random.default_rng(seed)
    return [
        dataclasses.replace(
            run,
            values={
                each: value * factor * (1 + noise * generator.standard_normal())
                for each, value in run.values.items()
            },
        )
        for factor in factors
    ]


@pytest.mark.parametrize("seed", range(5))
def test_run_of_a_change_is_found(seed: int, run: ComparedRun) -> None:
    runs = runs_of(run, [1.0] * 9 + [1.06] * 8, noise=0.01, seed=seed)
    (change,) = find_history_changes(runs)
    assert abs(runs.index(change.first) - 9) <= 1
    assert change.comparison.changes[STEP].share == pytest.approx(0.06, abs=0.02)


def test_slower_and_faster_again_are_two_changes(run: ComparedRun) -> None:
    runs = runs_of(run, [1.0] * 8 + [1.1] * 8 + [1.0] * 8, noise=0.01, seed=1)
    assert [runs.index(each.first) for each in find_history_changes(runs)] == [8, 16]


def test_equal_runs_have_a_change_in_at_most_one_of_ten_histories(run: ComparedRun) -> None:
    found = [find_history_changes(runs_of(run, [1.0] * 20, 0.02, seed)) for seed in range(40)]
    assert sum(map(bool, found)) <= 4


def with_settings(run: ComparedRun, **settings: str) -> ComparedRun:
    report: Any = {**run.report, "run": {**run.report["run"], "settings": settings}}
    return dataclasses.replace(run, report=report)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            {"commit": "3fa9c1d25d41", "torch": "2.12.0"},
            {"commit": "5d41ab073fa9", "torch": "2.13.0"},
            "Changed with it: commit 3fa9c1d25d41 -> 5d41ab073fa9, torch 2.12.0 -> 2.13.0.",
        ),
        (
            {"torch": "2.12.0"},
            {"torch": "2.12.0", "OMP_NUM_THREADS": "4"},
            "Changed with it: OMP_NUM_THREADS not set -> 4.",
        ),
        ({"commit": "a"}, {"commit": "a"}, "No recorded setting changed with it."),
        ({"torch": "2"}, {"torch": "2"}, "changed with it; the commit was not recorded."),
        ({}, {"commit": "a"}, "The commit and settings of these runs were not recorded."),
    ],
)
def test_change_names_the_settings_that_changed_with_it(
    before: dict[str, str], after: dict[str, str], sentence: str, run: ComparedRun
) -> None:
    runs = [
        with_settings(each, **(before if number < 9 else after))
        for number, each in enumerate(runs_of(run, [1.0] * 9 + [1.5] * 8, noise=0.01, seed=1))
    ]
    found = History(runs, find_history_changes(runs), {}, [])
    assert history_screens.build_headline(found).sentence.endswith(sentence)


def test_page_marks_the_change_in_a_chart(run: ComparedRun, tmp_path: Path) -> None:
    runs = runs_of(run, [1.0] * 9 + [1.5] * 8, noise=0.01, seed=1)
    found = History(runs, find_history_changes(runs), {}, [])
    history_screens.write_history_page(found, tmp_path / "page.html")
    (image,) = re.findall(r'<img alt="([^"]*)"', (tmp_path / "page.html").read_text())
    assert "over runs 1 to 17" in image
    assert "It changed with run 10." in image


def test_command_lists_runs_and_says_that_there_are_too_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        simulate_run(tmp_path / f"run-{number}", seed=number, steps=40)
    assert main(["history", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "CANNOT SAY" in text
    assert "run-0" in text
    assert main(["history", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2
    page = tmp_path / "history.html"
    assert main(["history", str(tmp_path), "--html", str(page), "--quiet"]) == 0
    assert "run-1" in page.read_text()
