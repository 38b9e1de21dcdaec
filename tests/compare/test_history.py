"""The history of a job names the run from which its step changed, and only that run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.simulated_runs import simulate_run
from torchlens_perf.commands.cli import main
from torchlens_perf.compare.comparison import ComparedRun, read_compared_run
from torchlens_perf.compare.history import find_history_changes
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
