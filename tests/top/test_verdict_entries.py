"""The report's verdicts as a screen lists them: with the report's times, and in its order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.top.reports import changed, report_of, verdict, view_of
from torchlens_perf.top.lettering import Lettering
from torchlens_perf.top.overview import clock_time, verdict_lines
from torchlens_perf.top.verdict_entries import Entry, verdict_entries
from torchlens_perf.verdicts.words.hang import HangEvidence, RankStack
from torchlens_perf.verdicts.words.report import Report

HANG = HangEvidence("missing", 12.0, 40, (1,), (0, 2), {1: RankStack(("a.py:1 f", "b.py:2 g"), "")})


def slow(rank: int, since: int = 40, **more: Any) -> dict[str, Any]:
    return verdict("straggler", f"Rank {rank} is slow. Next: look.", rank=rank, since_step=since, **more)


def was_slow(rank: int, since: int = 40, **more: Any) -> dict[str, Any]:
    return verdict("straggler_ended", f"Rank {rank} was slow.", rank=rank, since_step=since, **more)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(view_of(tmp_path_factory.mktemp("verdicts") / "run", 2, blocks=2))


@pytest.fixture
def shown(report: Report) -> Any:
    """Return the entries of a report with these verdicts."""

    def look(*rows: dict[str, Any]) -> list[Entry]:
        return verdict_entries(changed(report, verdicts=list(rows)))

    return look


def test_unknown_times_are_not_shown(shown: Any) -> None:
    entry, past = shown(slow(3), was_slow(5))

    assert (entry.holds, entry.began_s, past.holds, past.ended_s) == (True, None, False, None)
    assert verdict_lines([entry], 80, Lettering())[0].plain == "Rank 3 is slow."
    assert verdict_lines([past], 80, Lettering())[0].plain == "over: Rank 5 was slow."


def test_no_report_has_no_entries() -> None:
    assert verdict_entries(None) == []


def test_times_are_those_of_the_report(shown: Any) -> None:
    """Where it says since when a verdict holds, and until when it held."""
    windows = {"windows_held": 9, "windows_judged": 12}
    held = {"since": "2026-11-23T09:00:00+00:00", "until": None, **windows}
    over = {"since": "2026-11-23T08:00:00+00:00", "until": "2026-11-23T08:30:00+00:00", **windows}
    entry, past = shown(slow(3, held=held), was_slow(5, held=over))

    assert entry.began_s == 1795424400.0
    assert entry.details == ("It held in 9 of 12 windows of the run.",)
    assert past.ended_s is not None
    assert past.began_s is not None
    assert past.ended_s - past.began_s == 1800
    first, *_ = verdict_lines([past], 80, Lettering())
    assert first.plain == f"{clock_time(past.ended_s)} over after 30 min: Rank 5 was slow."
    assert verdict_lines([entry], 80, Lettering())[0].plain.startswith(f"since {clock_time(entry.began_s)} Rank 3")


def test_hang_brings_its_stacks(shown: Any) -> None:
    (entry,) = shown(verdict("hang", "No step for 12 s. Next: look.", rank=1, since_step=40, evidence=HANG))

    assert entry.details == ("Python stack of rank 1, innermost first:", "  a.py:1 f", "  b.py:2 g")
    assert [line.plain for line in verdict_lines([entry], 80, Lettering(), details=True)][2:] == [
        "  Python stack of rank 1, innermost first:", "    a.py:1 f", "    b.py:2 g"
    ]  # fmt: skip
