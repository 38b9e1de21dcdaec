"""Tests of the benchmark of detectors: scores of known answers, and how answers are read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.detectors.campaign import (
    ENVIRONMENTS,
    draw_truths,
    other_programs,
    read_runs,
    run_campaign,
)
from benchmarks.detectors.protocol import Named, Run, read_run, times_path, write_answer, write_json
from benchmarks.detectors.scoring import Figure, cell, differences, measured_cost_s, score
from benchmarks.detectors.tools import CONTROL, scores_as_answer, traceml_answer, verdicts_as_answer
from benchmarks.planted_truth import FAULTY, HEALTHY, Fault, Truth, plant
from tests.support.leftovers import eventually
from torchlens_perf.run.processes import process_cpu_time_s

STEPS = 100


def make_run(*named: Named, step_s: float = 0.05, faults: tuple[Fault, ...] | None = None) -> Run:
    """Return a run of two ranks, whose rank 1 takes 20 ms longer from step 40 on."""
    if faults is None:
        faults = (Fault(1, "data", 40, None, 20, "sleep"),)
    truth = Truth("data" if faults else "clean", 1, 2, STEPS, faults)
    seconds = tuple(
        step_s + 0.02 * any(fault.slows(step) for fault in faults) for step in range(STEPS)
    )
    return Run(truth, named, (seconds, seconds))


def test_right_answer_is_scored_by_rank_phase_start_and_cost() -> None:
    scores = score([make_run(Named(1, "data", 43, 0.025))], {"data-0001": make_run(step_s=0.04)})

    assert scores["rank"] == Figure.share([True])
    assert scores["phase"] == Figure.share([True])
    assert scores["start"] == Figure(3, None, 1)
    assert scores["cost"] is not None
    assert scores["cost"].value == pytest.approx(0.25)
    assert scores["watching"] is not None
    assert scores["watching"].value == pytest.approx(0.07 / 0.06)
    assert scores["false_faulty"] == Figure.share([False])
    assert scores["false_clean"] is None


@pytest.mark.parametrize("named", [(), (Named(0, "data", 40, 0.02), Named(1, "data", 40, 0.02))])
def test_missing_or_second_answer_is_not_right(named: tuple[Named, ...]) -> None:
    """Start and cost of a wrong rank are not scored."""
    scores = score([make_run(*named)], {})

    assert scores["rank"] == scores["phase"] == Figure.share([False])
    assert scores["start"] is None
    assert scores["cost"] is None
    assert scores["watching"] is None
    assert scores["false_faulty"] == Figure.share([bool(named)])


def test_any_name_in_a_clean_run_is_false() -> None:
    scores = score([make_run(Named(0), faults=()), make_run(faults=())], {})

    assert scores["false_clean"] == Figure.share([True, False])
    assert scores["rank"] is None


def test_cost_of_an_intermittent_fault_is_spread_over_all_steps() -> None:
    constant, half = (
        make_run(faults=(Fault(1, "host", 40, None, 20, "sleep", slow_of=slots),))
        for slots in (None, (2, (1,)))
    )

    assert measured_cost_s(constant) == pytest.approx(0.02)
    assert measured_cost_s(half) == pytest.approx(0.01)
    faster = dataclasses.replace(constant, seconds=(tuple(range(STEPS, 0, -1)),) * 2)
    assert measured_cost_s(faster) is None


def test_only_intervals_that_do_not_overlap_are_differences() -> None:
    few, many = Figure.share([True] * 3), Figure.share([True] * 40)
    none = Figure.share([False] * 40)

    assert list(differences({"A": {"rank": few, "start": None}}, {"A": {"rank": many}})) == []
    (line,) = differences({"A": {"rank": many}}, {"A": {"rank": none}, "B": {"rank": many}})
    assert line == "A: right rank: 40/40 (91% to 100%), then 0/40 (0% to 9%)"
    assert cell("rank", None) == "-"


def test_median_of_fewer_than_six_samples_has_no_interval() -> None:
    few, many = Figure.median([3.0] * 5), Figure.median([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    assert few == Figure(3, None, 5)
    assert cell("start", few) == "3 (samples: 5)"
    assert many is not None
    assert many.interval is not None
    assert 1 <= many.interval[0] < many.value < many.interval[1] <= 6
    assert list(differences({"A": {"start": few}}, {"A": {"start": many}})) == []


def test_every_kind_of_fault_is_drawn_before_one_repeats() -> None:
    drawn = list(itertools.islice(draw_truths(5, 4), 28))

    assert drawn == list(itertools.islice(draw_truths(5, 4), 28))
    assert drawn != list(itertools.islice(draw_truths(6, 4), 28))
    faulty = [truth.kind for truth in drawn if truth.faults]
    assert set(faulty[: len(FAULTY)]) == set(FAULTY)
    assert Counter(truth.kind for truth in drawn if not truth.faults) == dict.fromkeys(HEALTHY, 7)


def test_run_is_read_as_written_and_only_when_complete(tmp_path: Path) -> None:
    run = Run(plant("moving", 3, 2), (Named(1, None, 30, None), Named(0)), ((0.1, 0.2), (0.1, 0.3)))
    write_json(tmp_path / "truth.json", run.truth.to_json())
    write_answer(tmp_path, run.named)
    write_json(times_path(tmp_path, 0), run.seconds[0])
    with pytest.raises(FileNotFoundError):
        read_run(tmp_path)
    write_json(times_path(tmp_path, 1), run.seconds[1])
    assert read_run(tmp_path) == run


@pytest.mark.parametrize(
    ("diagnosis", "named"),
    [
        ({"kind": "INPUT_STRAGGLER", "ranks": [3]}, [Named(3, "data")]),
        ({"kind": "COMPUTE_STRAGGLER", "ranks": [1]}, [Named(1, "forward")]),
        ({"kind": "STRAGGLER", "ranks": [0]}, [Named(0)]),
        ({"kind": "COMPUTE_BOUND", "ranks": [2]}, []),
        ({"kind": "BALANCED", "ranks": []}, []),
    ],
)
def test_straggler_diagnoses_of_traceml_are_read_as_answers(
    tmp_path: Path, diagnosis: dict[str, Any], named: list[Named]
) -> None:
    """TraceML's "cause not measured" gives no phase, and a diagnosis of all ranks gives no rank."""
    (tmp_path / "summary").write_text(json.dumps({"step_time": {"diagnosis": diagnosis}}))
    assert traceml_answer(tmp_path / "summary") == named


def test_lowest_score_of_resiliency_ext_is_the_answer() -> None:
    slow = {"forward": {0, 2}, "data": {1}}
    stragglers = {
        name: [SimpleNamespace(rank=rank) for rank in ranks] for name, ranks in slow.items()
    }
    scores = {"forward": {0: 0.7, 1: 1.0, 2: 0.5}, "data": {0: 1.0, 1: 0.6, 2: 0.9}}

    assert scores_as_answer(stragglers, scores) == [
        Named(2, "forward"),
        Named(1, "data"),
        Named(0, "forward"),
    ]


def test_verdicts_on_slow_ranks_are_the_answer() -> None:
    """Other verdicts name no rank. Ranks of a slow node are named without own costs."""
    verdict = {"phase": "data", "since_step": 41, "cost_s_per_step": 0.02}
    verdicts = [
        SimpleNamespace(kind="data_bound", rank=0, ranks=(0,), **verdict),
        SimpleNamespace(kind="straggler", rank=3, ranks=(2, 3), **verdict),
        SimpleNamespace(kind="straggler_transient", rank=1, ranks=(1,), **verdict),
    ]

    assert verdicts_as_answer(verdicts) == [
        Named(3, "data", 41, 0.02),
        Named(2),
        Named(1, "data", 41, 0.02),
    ]


@pytest.mark.long
def test_one_round_runs_each_tool_on_the_same_fault(tmp_path: Path) -> None:
    names = [CONTROL, "torchlens_perf"]
    assert run_campaign(names, draw_truths(1, 2), 0.01, tmp_path, ENVIRONMENTS) == dict.fromkeys(
        names, 0
    )

    (plain,), (watched,) = (read_runs(tmp_path, name) for name in names)
    assert plain.truth == watched.truth == next(draw_truths(1, 2))
    assert len(plain.named) == 1
    assert {len(seconds) for seconds in (*plain.seconds, *watched.seconds)} == {plain.truth.steps}


def test_other_programs_keep_cpus_busy_until_the_end_of_the_campaign() -> None:
    with other_programs(2) as programs:
        assert eventually(lambda: all(process_cpu_time_s(each.pid) > 0.1 for each in programs))
    assert [each.returncode for each in programs] == [-signal.SIGKILL] * 2
