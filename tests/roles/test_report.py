"""Tests of the report on jobs with several roles, made from recorded events of real jobs.

Each folder in recorded/ has the events of a job of benchmarks/rl_job.py with one planted fault.
`UPDATE_GOLDEN=1` writes the golden file, and the commit explains why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden.golden_text import expected_text, golden_text
from tests.report.test_schema import episode, judged, node
from tests.roles.tables import job_iterations
from tests.support.reports import as_json, checked
from torchlens_perf.report.build import build_report
from torchlens_perf.report.run_report import report_from_states
from torchlens_perf.roles import causes
from torchlens_perf.roles.causes import find_causes
from torchlens_perf.roles.report import add_iterations, replace_verdicts
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.view.terminal import render_full

RECORDED = Path(__file__).parent / "recorded"
FAULTS = sorted(each.name for each in RECORDED.iterdir() if each.name != "clean")
SUBJECTS = {
    causes.SLOW_ENGINE: "engine-1", causes.LOADED_ENGINE: "engine-1", causes.SLOW_RANK: "rank 1",
}  # fmt: skip
ITERATIONS = 5
WAIT_S = 0.43
"""Time of an iteration of tables.py in which the trainer makes no steps."""


def report_on(fault: str) -> Any:
    """Return a report on two ranks without a problem, with the events of a recorded job."""
    report = build_report("run", [node(ranks=2)])
    add_iterations(RunDirectory(RECORDED / fault), report)
    return checked(report)


def slow_iterations(report: Any) -> list[Any]:
    return [each for each in report["verdicts"] if each.kind == "slow_iteration"]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_of_a_recorded_job_is_the_verdict(fault: str) -> None:
    report = report_on(fault)

    (verdict,) = slow_iterations(report)
    assert verdict.evidence.cause == fault
    assert verdict.evidence.found.subject == SUBJECTS.get(fault, verdict.evidence.found.subject)
    text = golden_text(fault, {"verdicts": [verdict]})
    assert text == expected_text(text, RECORDED / fault / "verdict.txt")


def test_recorded_job_without_a_fault_has_no_verdict_and_a_table() -> None:
    report = report_on("clean")

    assert not slow_iterations(report)
    text = render_full(report, "run", columns=100, color=False)
    assert "Iterations of all roles (7 of " in text
    assert "waiting for an engine" in text
    parts = report["iterations"].parts
    assert sum(parts.values()) == pytest.approx(report["iterations"].mean_s)


def test_job_without_roles_has_no_iterations(tmp_path: Path) -> None:
    report, _ = report_from_states(RunDirectory(tmp_path), [node()], [])

    assert "iterations" not in as_json(report)


WAITED_MS = 1e3 * WAIT_S
"""The wait of a step, if an iteration has one."""


@pytest.mark.parametrize(
    ("kind", "ranks", "parts", "is_kept"),
    [
        ("host_bound", 1, {"host": WAITED_MS}, False),
        ("host_bound", 1, {"host": 10 * WAITED_MS}, True),
        ("communication_bound", 2, {"communication": WAITED_MS / 2}, False),
        ("communication_bound", 2, {"communication": 5 * WAITED_MS}, True),
    ],
)
def test_verdict_on_steps_is_left_out_if_it_is_the_trainers_wait(
    kind: str, ranks: int, parts: dict[str, float], is_kept: bool
) -> None:
    """Half of the ranks wait for the other half in the mean of two ranks."""
    report = build_report("run", [node(parts, ranks)])
    assert kind in [each.kind for each in report["verdicts"]]
    iterations = job_iterations(iterations=ITERATIONS)
    replace_verdicts(report, iterations, find_causes(iterations), 0, WAIT_S)

    assert (kind in [each.kind for each in report["verdicts"]]) == is_kept
    assert ("table of iterations" in str(report["quality"]["notes"])) != is_kept


def test_slow_rank_with_a_verdict_of_its_own_has_no_second_one() -> None:
    """The verdict on a slow rank has its cause and its modules."""
    own_s = [0.05, 0.25]
    steps = [
        causes.RankStep(str(batch), f"rank {rank}", step, seconds)
        for batch in range(ITERATIONS)
        for step in range(2)
        for rank, seconds in enumerate(own_s)
    ]
    iterations = job_iterations(steps_s=0.5)
    found = find_causes(iterations, steps)
    with_verdict = build_report("run", [judged(episode(1))])
    reports = [build_report("run", [node()]), with_verdict]
    for report in reports:
        replace_verdicts(report, iterations, found, 0, WAIT_S)

    assert [len(slow_iterations(report)) for report in reports] == [1, 0]
