"""The report's verdicts as a screen lists them: with the report's times, and in its order."""

from __future__ import annotations

from typing import Any

from tests.top.reports import verdict
from torchlens_perf.top.lettering import Lettering
from torchlens_perf.top.overview import clock_time, seconds_of
from torchlens_perf.top.verdict_lines import verdict_lines
from torchlens_perf.verdicts.words.hang import HangEvidence, RankStack
from torchlens_perf.verdicts.words.order import ranks_of

HANG = HangEvidence("missing", 12.0, 40, (1,), (0, 2), {1: RankStack(("a.py:1 f", "b.py:2 g"), "")})


def slow(rank: int, since: int = 40, **more: Any) -> dict[str, Any]:
    return verdict("straggler", f"Rank {rank} is slow. Next: look.", rank=rank, since_step=since, **more)


def was_slow(rank: int, since: int = 40, **more: Any) -> dict[str, Any]:
    return verdict("straggler_ended", f"Rank {rank} was slow.", rank=rank, since_step=since, **more)


def lines(*rows: dict[str, Any], details: bool = False) -> list[str]:
    return [line.plain for line in verdict_lines(rows, 80, Lettering(), details=details)]  # type: ignore[arg-type]


def test_unknown_times_are_not_shown() -> None:
    assert lines(slow(3))[0] == "Rank 3 is slow."
    assert lines(was_slow(5)) == ["over: Rank 5 was slow."]


def test_times_are_those_of_the_report() -> None:
    """Where it says since when a verdict holds, and until when it held."""
    windows = {"windows_held": 9, "windows_judged": 12}
    held = {"since": "2026-11-23T09:00:00+00:00", "until": None, **windows}
    over = {"since": "2026-11-23T08:00:00+00:00", "until": "2026-11-23T08:30:00+00:00", **windows}
    ended = clock_time(seconds_of("2026-11-23T08:30:00+00:00"))

    assert lines(slow(3, held=held), details=True) == [
        f"since {clock_time(1795424400.0)} Rank 3 is slow.", "  Next: look.",
        "  It held in 9 of 12 windows of the run.",
    ]  # fmt: skip
    assert lines(was_slow(5, held=over)) == [f"{ended} over after 30 min: Rank 5 was slow."]


def test_hang_brings_its_stacks() -> None:
    row = verdict("hang", "No step for 12 s. Next: look.", rank=1, since_step=40, evidence=HANG)

    assert lines(row, details=True)[2:] == [
        "  Python stack of rank 1, innermost first:", "    a.py:1 f", "    b.py:2 g"
    ]  # fmt: skip


def test_ranks_are_those_of_the_evidence() -> None:
    """Else the verdict's own; none for the job as a whole."""
    assert ranks_of(verdict("hang", "No step.", rank=3, evidence=HANG)) == (1,)  # type: ignore[arg-type]
    assert ranks_of(slow(3)) == (3,)  # type: ignore[arg-type]
    assert ranks_of(verdict("none", "No rank is slow.")) == ()  # type: ignore[arg-type]
