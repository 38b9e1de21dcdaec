"""Verdicts as they come and go: nothing is said to be over that only is not mentioned."""

from __future__ import annotations

from typing import Any

import pytest

from tests.top.reports import changed, report_of, verdict, view_of
from torchlens_perf.analysis.words.hang import HangEvidence, RankStack
from torchlens_perf.analysis.words.report import Report
from torchlens_perf.top.lettering import Lettering
from torchlens_perf.top.overview import clock_time, verdict_lines
from torchlens_perf.top.verdict_list import MAX_PAST, Entry, VerdictList

BOUND = verdict("compute_bound", "Computing takes 90% of a typical step. Next: start with mlp.")
NOBODY = verdict("none", "No rank stands out over 64 steps.")
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
    """Shows one look after another, a second apart, and returns the entries."""
    verdicts, clock = VerdictList(), [1000.0]

    def look(*rows: dict[str, Any], attempt: int = 0) -> list[Entry]:
        verdicts.update(changed(report, verdicts=list(rows), attempt=attempt), clock[0])
        clock[0] += 1.0
        return verdicts.entries()

    return look


def test_what_was_there_before_has_no_time(shown: Any) -> None:
    """At the first look nobody knows when it began; at a later one it is new."""
    assert [(each.seen_s, each.began_s) for each in shown(slow(3))] == [(None, None)]
    assert [(each.ranks, each.seen_s) for each in shown(slow(3), slow(5))] == [((5,), 1001.0), ((3,), None)]


def test_words_of_a_verdict_that_holds_change(shown: Any) -> None:
    """Also the step that it began at: it stays one entry, first seen when it was."""
    shown(NOBODY)
    shown(slow(3, since=40))
    (entry,) = shown(slow(3, since=36))

    assert (entry.since_step, entry.seen_s, entry.action) == (36, 1001.0, "look.")


def test_end_that_the_report_tells(shown: Any) -> None:
    """The sentence on what it was replaces the one on what it is, and stays where it is."""
    shown(NOBODY)
    shown(slow(3))
    for _ in range(3):
        nobody, past = shown(NOBODY, was_slow(3))

        assert nobody.holds
        assert (past.text, past.holds, past.seen_s, past.ended_s) == ("Rank 3 was slow.", False, 1001.0, 1002.0)


def test_end_that_the_report_does_not_tell(shown: Any) -> None:
    """A slow link that is not found any more is listed as it stood, without its next action."""
    shown(NOBODY)
    shown(verdict("slow_link", "The link from rank 0 to 1 is slow. Next: test the network."))
    _, past = shown(NOBODY)

    assert (past.kind, past.holds, past.seen_s, past.ended_s, past.action) == ("slow_link", False, 1001.0, 1002.0, "")


def test_again_slow_is_another_entry(shown: Any) -> None:
    shown(slow(3, since=40))
    shown(NOBODY, was_slow(3, since=40))
    entries = shown(slow(3, since=200), was_slow(3, since=40))

    assert [(each.holds, each.since_step) for each in entries] == [(True, 200), (False, 40)]
    entries = shown(NOBODY, was_slow(3, since=200), was_slow(3, since=40))
    assert [(each.holds, each.since_step, each.ended_s) for each in entries[1:]] == [
        (False, 200, 1003.0), (False, 40, 1001.0)
    ]  # fmt: skip


def test_verdicts_on_the_whole_run_do_not_end(shown: Any) -> None:
    """They give way to what is more important: nothing says that they do not hold."""
    shown(NOBODY, BOUND)

    assert [each.kind for each in shown(slow(3))] == ["straggler"]


def test_hang_does_not_end_what_was_before(shown: Any) -> None:
    """A report on a hang speaks of nothing else. The slow rank is neither over, nor gone."""
    shown(NOBODY)
    shown(slow(3))
    hang, before = shown(verdict("hang", "No step for 12 s. Next: look.", rank=1, since_step=40, evidence=HANG))
    assert (hang.kind, before.kind, before.holds) == ("hang", "straggler", True)

    (entry, past) = shown(slow(3))
    assert (entry.kind, entry.seen_s) == ("straggler", 1001.0)
    assert (past.kind, past.holds, past.ended_s) == ("hang", False, 1003.0)


def test_more_ranks_of_the_same_node(shown: Any) -> None:
    """One rank that turns out to be one of a slow node has not ended."""
    from torchlens_perf.analysis.words.evidence import PastStragglerEvidence  # any evidence with ranks will do

    class OfANode(PastStragglerEvidence, frozen=True):
        ranks: tuple[int, ...] = (2, 3)

    shown(NOBODY)
    shown(slow(3))
    node = slow(2, evidence=OfANode("slow_compute", 0, 0.1, None))
    (entry,) = shown(node)

    assert (entry.ranks, entry.seen_s) == ((2, 3), 1001.0)


def test_restart_ends_what_was(shown: Any) -> None:
    """The ranks of the next attempt are other processes."""
    shown(slow(3))
    entries = shown(slow(3), attempt=1)

    assert [(each.holds, each.ended_s) for each in entries] == [(True, None), (False, 1001.0)]


def test_times_of_the_report_win(shown: Any) -> None:
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


def test_what_was_only_seen_is_said_to_be(shown: Any) -> None:
    """When it was seen here is later than when it began: its duration is not claimed."""
    shown(NOBODY)
    entry, *_ = shown(slow(3))
    assert verdict_lines([entry], 80, Lettering())[0].plain == f"seen {clock_time(1001.0)} Rank 3 is slow."
    _, past = shown(NOBODY, was_slow(3))

    assert verdict_lines([past], 80, Lettering())[0].plain == (
        f"{clock_time(1002.0)} over, seen for 1 s: Rank 3 was slow."
    )


def test_hang_brings_its_stacks(shown: Any) -> None:
    (entry,) = shown(verdict("hang", "No step for 12 s. Next: look.", rank=1, since_step=40, evidence=HANG))

    assert entry.details == ("Python stack of rank 1, innermost first:", "  a.py:1 f", "  b.py:2 g")
    assert [line.plain for line in verdict_lines([entry], 80, Lettering(), details=True)][2:] == [
        "  Python stack of rank 1, innermost first:", "    a.py:1 f", "    b.py:2 g"
    ]  # fmt: skip


def test_the_past_is_bounded(shown: Any) -> None:
    """A run of weeks: the oldest go."""
    for step in range(2 * MAX_PAST):
        entries = shown(NOBODY, was_slow(3, since=step))

    assert len(entries) == MAX_PAST + 1
    assert entries[1].since_step == 2 * MAX_PAST - 1
