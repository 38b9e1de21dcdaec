"""Long steps in which all ranks waited for one rank, which is found by each rank's parts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.report.test_held import node
from tests.support.findings import findings
from tests.support.reports import checked
from tests.verdicts.words.test_bottleneck import BASE
from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.report.build import build_report
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.words.phases import phase_name

USUAL = {**BASE, "communication": 2.0}
RANKS = 6


def stalls(
    part: str, steps: tuple[int, ...], rank: int = 4, wait: str = "communication"
) -> list[list[dict[str, Any]]]:
    """Return loops in which a rank takes 372 ms longer in a part, while the others wait."""
    loops = [[dict(USUAL) for _ in range(128)] for _ in range(RANKS)]
    for number, loop in enumerate(loops):
        for step in steps:
            its = part if number == rank else wait
            loop[step] = {**USUAL, its: USUAL[its] + 372.0}
    return loops


def report_on(loops: list[list[dict[str, Any]]]) -> dict[str, Any]:
    return checked(build_report("r", [node(loops, findings(last_step=127, compared=RANKS))]))


def long(report: dict[str, Any]) -> list[str]:
    return [row.sentence for row in report["verdicts"] if row.kind == "long_steps"]


@pytest.mark.parametrize("wait", ["communication", "backward"])
@pytest.mark.parametrize("part", ["data", "forward", "host", "optimizer"])
def test_verdict_on_long_steps_has_the_awaited_rank_and_the_steps(part: str, wait: str) -> None:
    report = report_on(stalls(part, (24, 66), wait=wait))
    (text,) = long(report)

    assert text.startswith(
        "Steps 24 and 66: all other ranks waited 372 ms each time (744 ms in total, "
    )
    assert f" for rank 4, which was mostly in {phase_name(part)}. Next: " in text
    assert report["verdicts"][0].rank == 4
    assert report["steps"]["long"][0]["waited_for"] == 4


def test_verdict_on_a_single_long_step_has_the_awaited_rank() -> None:
    (text,) = long(report_on(stalls("host", (90,))))
    assert text.startswith(
        "Step 90: all other ranks waited 372 ms (14% of all step time) for rank 4, which was mostly in"
        " host code."
    )


def test_rank_without_a_cpu_is_not_blamed_for_long_steps() -> None:
    """The rank was runnable without a CPU, so no part of its step explains the delay."""
    loops = stalls("host", (90,))
    for loop in loops:
        for number, step in enumerate(loop):
            loop[number] = {**step, "cpu": 0.0}
    loops[4][90] = {**loops[4][90], "cpu": 350.0, "cpu_in": "host"}
    report = report_on(loops)

    assert all(each["waited_for"] is None for each in report["steps"]["long"])
    assert not any("for rank 4" in text for text in long(report))


def test_loss_of_the_job_includes_the_waiting_rank() -> None:
    """One of two ranks waits, so the job loses the additional time of the step."""
    loops = [[dict(USUAL) for _ in range(128)] for _ in range(2)]
    loops[0][90] = {**USUAL, "communication": 374.0}
    loops[1][90] = {**USUAL, "host": 374.0}
    report = checked(build_report("r", [node(loops, findings(last_step=127, compared=2))]))
    (row,) = (row for row in report["verdicts"] if row.kind == "long_steps")
    waited = format_duration(row.evidence.long["more_s"])

    assert (
        row.evidence.long["total_s"]
        == row.evidence.long["more_s"]
        == pytest.approx(0.373, abs=0.003)
    )
    assert row.sentence.startswith(f"Step 90: the other rank waited {waited} (14% of")


def test_no_rank_is_blamed_if_ranks_wait_for_different_ones() -> None:
    loops = stalls("host", (24,), rank=4)
    for number, loop in enumerate(stalls("host", (66,), rank=2)):
        loops[number][66] = loop[66]
    report = report_on(loops)

    assert all(each["waited_for"] is None for each in report["steps"]["long"])


@pytest.mark.parametrize(
    "loops", [stalls("host", (24,), wait="host"), stalls("communication", (24,))]
)
def test_no_rank_is_blamed_if_all_ranks_behave_the_same(loops: list[list[dict[str, Any]]]) -> None:
    """All ranks are busy, or all wait."""
    assert all(each["waited_for"] is None for each in report_on(loops)["steps"]["long"])


def test_long_steps_with_a_known_cause_are_not_described_as_waits() -> None:
    loops = stalls("host", (24, 66))
    for loop in loops:
        for step in (24, 66):
            loop[step]["flags"] = int(Flag.CHECKPOINT)

    assert all("saving" in text for text in long(report_on(loops)))


@pytest.mark.parametrize("wait", ["communication", "backward"])
def test_many_regular_stalls_are_one_sentence(wait: str) -> None:
    """Each rank keeps only the newest step numbers."""
    report = report_on(stalls("host", tuple(range(8, 128, 10)), wait=wait))
    (text,) = long(report)

    assert text.startswith(
        "One step in 10: all other ranks waited 372 ms each time (4.46 s in total, "
    )
    assert [each["waited_for"] for each in report["steps"]["long"]] == [4]
    assert report["steps"]["long"][0]["count"] == 12


def test_rank_that_works_while_others_wait_is_blamed() -> None:
    """An example is a rank that saves a checkpoint."""
    loops = stalls("host", tuple(range(8, 128, 10)), rank=3)
    for step in range(8, 128, 10):
        loops[3][step]["flags"] = int(Flag.CHECKPOINT)
    report = report_on(loops)
    (text,) = long(report)

    assert text.startswith(
        "One step in 10 takes 372 ms longer on average (saving a checkpoint, on rank 3; all"
        " other ranks wait): 4.46 s in total, "
    )
    assert [each["waited_for"] for each in report["steps"]["long"]] == [3]


@pytest.mark.parametrize("saving", [(3, 5), tuple(range(RANKS))])
def test_no_rank_is_blamed_if_several_work_while_others_wait(saving: tuple[int, ...]) -> None:
    loops = stalls("host", tuple(range(8, 128, 10)), rank=3)
    for rank in saving:
        for step in range(8, 128, 10):
            loops[rank][step] = {**loops[3][step], "flags": int(Flag.CHECKPOINT)}
    (text,) = long(report_on(loops))

    assert "(saving a checkpoint, on " in text
