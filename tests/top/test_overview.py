"""The screens of top show the facts of the report in its words, and no invented values."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from tests.top.reports import changed, report_of, verdict, view_of
from torchlens_perf.run.failure import ProcessActivity
from torchlens_perf.top import overview
from torchlens_perf.top.pace import describe_pace
from torchlens_perf.top.rank_screen import rank_lines
from torchlens_perf.top.ranks import build_rank_list
from torchlens_perf.top.reading import View
from torchlens_perf.top.text import Terminal
from torchlens_perf.verdicts.words.hang import HangEvidence, RankStack
from torchlens_perf.view.headline import build_headlines, choose_headline

UNICODE, ASCII = Terminal(), Terminal(ascii_only=True, color=False)
HANG = HangEvidence(
    "missing", 42.0, 40, (0, 2), {1: RankStack(("a.py:1 f", "b.py:2 g"), "")}, "", "", ranks=(1,)
)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    """Return the view of four ranks on two nodes, in which rank 3 is slow."""
    folder = tmp_path_factory.mktemp("frame")
    return view_of(
        folder / "run", 4, "constant:rank=3,share=0.3,phase=forward", blocks=3, node_size=2
    )


def frame(view: View, width: int = 100, terminal: Terminal = UNICODE) -> list[str]:
    return plain(overview.build_frame(view, width, terminal))


def screen(view: View, width: int = 80, height: int = 23) -> list[str]:
    return plain(overview.build_overview(view, width, height, UNICODE, build_rank_list(view)[0], 0))


def of_rank(view: View, rank: int, width: int = 100) -> list[str]:
    return plain(rank_lines(view, rank, width))


def plain(lines: list[Text]) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def with_report(view: View, **parts: Any) -> View:
    report = changed(report_of(view), **parts)
    return dataclasses.replace(view, report=report, headlines=tuple(build_headlines(report)))


def test_headline_of_the_first_verdict_is_at_the_top(view: View) -> None:
    """A line has status, rank, phase and first step.

    Cost, evidence, action and a command follow.
    """
    of = choose_headline(view.headlines)
    assert of is not None

    for lines in (screen(view), screen(view, 200, 60), frame(view)):
        assert re.match(r"  SLOW RANK +rank 3 \(node-0001\) +forward +since step 0", lines[1])
        text = joined(lines)
        assert f"cost {of.cost}" in text
        assert of.sentence[-30:] in text
        assert f"next {of.action}" in text
        assert of.command.split()[0] == "torchlens-perf"
        assert of.command in text


def test_every_rank_has_a_row_with_its_difference_to_others(view: View) -> None:
    table, ranks = build_rank_list(view)
    cells = next(each for each in table.columns if each.title == "vs others").texts()

    for lines in (screen(view), frame(view)):
        rows = {
            int(line.split()[line.startswith("▶")]): line
            for line in lines
            if re.match(r"[▶ ] {1,8}\d+ ", line)
        }
        assert list(rows) == ranks
        assert all(f" {cell} " in rows[rank] for rank, cell in zip(ranks, cells, strict=True))


def test_each_of_few_ranks_has_a_bar_of_its_phases(view: View) -> None:
    lines = screen(view)

    assert [line.split()[:2] for line in lines if line.startswith("  rank ")][1:] == [
        ["rank", str(r)] for r in (3, 0, 1, 2)
    ]
    assert "█ forward" in joined(lines)


def test_rank_breakdown_has_the_cpu_contention_of_the_verdict(view: View) -> None:
    """The parts on the rank's screen add up to its step."""
    ranks: Any = report_of(view)["ranks"]
    first = ranks[3]["typical"]
    lack = {part: 0.5 * first["parts"].get(part, 0.0) for part in ("forward", "backward")}
    typical = {**first, "lack_of_cpu": lack, "work_s": first["own_s"] - sum(lack.values())}
    found = with_report(view, ranks=[*ranks[:3], {**ranks[3], "typical": typical}])
    here = {line[:16].strip(): line.split() for line in of_rank(found, 3) if line.startswith("  ")}

    assert float(here["CPU contention"][2]) == pytest.approx(1e3 * sum(lack.values()), abs=1)
    assert "CPU contention" in joined(screen(found))


def test_small_terminal_shows_headline_and_ranks(view: View) -> None:
    for width, height in ((80, 23), (60, 23), (40, 15)):
        lines = screen(view, width, height)
        assert len(lines) <= height
        assert "SLOW RANK" in lines[1]
        assert len(joined(lines)) > 100


def test_large_terminal_also_shows_tables_of_the_report(view: View) -> None:
    """Less than half of the screen is empty."""
    lines = screen(view, 120, 60)

    assert any(line.startswith("  Modules") for line in lines)
    assert any(line.startswith("  Collectives") for line in lines)
    assert sum(not line for line in lines) < 8


@pytest.mark.parametrize("width", [1, 10, 20, 40, 80, 200])
@pytest.mark.parametrize("terminal", [UNICODE, ASCII])
def test_no_line_of_the_overview_is_wider_than_the_terminal(
    view: View, width: int, terminal: Terminal
) -> None:
    lines = frame(view, width, terminal)

    assert max(map(len, lines)) <= width
    assert terminal is UNICODE or all(line.isascii() for line in lines)


def test_up_to_three_other_findings_have_a_line_each(view: View) -> None:
    """Further findings are counted. Ended findings are called earlier."""
    over = [
        verdict("straggler_ended", f"Rank {rank} was slow.", rank=rank, since_step=8)
        for rank in range(4)
    ]
    lines = screen(with_report(view, verdicts=[*report_of(view)["verdicts"], *over]))

    assert sum(line.startswith("  earlier ") for line in lines) == 3
    assert any(line.endswith("more: press v") for line in lines)


def test_title_shows_whether_the_run_is_live(view: View) -> None:
    """A live run has the time of the newest data.

    An ended run has its end and the number of dead ranks.
    """
    assert overview.run_state_and_style(view)[0].startswith("LIVE ")
    run = {"live": False, "ended": "2026-11-23T09:00:00+00:00"}
    ranks: Any = [{**rank, "state": "closed"} for rank in report_of(view)["ranks"]]
    at = overview.format_clock_time("2026-11-23T09:00:00+00:00")
    assert overview.run_state_and_style(with_report(view, **run, ranks=ranks)) == (
        f"ENDED {at}",
        "bold",
    )
    dead = {**run, "died": [2], "ranks_seen": 4}
    assert (
        overview.run_state_and_style(with_report(view, **dead, ranks=ranks))[0]
        == f"ENDED {at}, rank 2 died"
    )
    assert overview.run_state_and_style(with_report(view, died=[2]))[0].endswith(", rank 2 died")


def test_hanging_run_shows_stacks_instead_of_its_pace(view: View) -> None:
    """The pace is the steps per second and the time left."""
    hangs = with_report(
        view,
        verdicts=[verdict("hang", "No step for 42 s.", rank=1, evidence=HANG)],
        total_steps=1000,
    )
    lines = screen(hangs, 100, 50)

    assert lines[1].startswith("  HANG ")
    assert "b.py:2 g" in joined(lines)
    assert "b.py:2 g" in joined(frame(hangs))
    assert [each.split()[0] for each in describe_pace(report_of(hangs), 0.2)] == [
        "96",
        "p50",
        "p95",
        "max",
    ]


def test_time_left_is_shown_only_with_a_total_number_of_steps(view: View) -> None:
    told = with_report(view, total_steps=1000)

    assert "left" not in joined(screen(view))
    assert "min left" in joined(screen(told))


def test_unmeasured_values_are_not_shown_as_zero(view: View) -> None:
    ranks: Any = [
        {
            **rank,
            "not_measured": ["communication"],
            "phases": {"forward": rank["phases"]["forward"]},
        }
        for rank in report_of(view)["ranks"]
    ]
    quality: Any = {**report_of(view)["quality"], "overhead_share": None}
    found = with_report(view, ranks=ranks, quality=quality)

    assert "overhead not measured" in joined(frame(found))
    assert "comm wait: not measured, part of backward." in joined(of_rank(found, 0))


def test_ranks_are_listed_without_values_before_the_first_step(view: View) -> None:
    ranks: Any = [
        {**rank, "phases": {}, "typical": None, "last_step": None, "steps": 0, "coverage": 0.0}
        for rank in report_of(view)["ranks"]
    ]
    steps: Any = {**report_of(view)["steps"], "p50_s": None, "count": 0}
    none = with_report(view, ranks=ranks, steps=steps, heat=None, history=None, verdicts=[])
    lines = screen(none)

    assert lines[1].startswith("── no step yet ")
    assert [line.split()[-1] for line in lines if re.match(r"[▶ ] +\d+$", line)] == [
        "0",
        "1",
        "2",
        "3",
    ]
    for said in (joined(frame(none)), joined(of_rank(none, 0))):
        assert "no step was recorded" in said
        assert "0.0% of" not in said


def test_rank_screen_has_activity_phases_modules_and_collectives(view: View) -> None:
    """Phases and modules are compared with those of other ranks."""
    now = ProcessActivity(97, 0.12, ("backward", "wait"), 0.1)
    ranks: Any = [{**rank, "now": now} for rank in report_of(view)["ranks"]]
    lines = of_rank(with_report(view, ranks=ranks), 3)
    text = joined(lines)

    assert lines[0].startswith("  rank 3 (local rank 1) on node-0001, pid ")
    assert "in step 97 for 120 ms, inside backward > wait for 100 ms" in text
    assert "SLOW RANK rank 3" in text
    assert "Typical step, host clock; others: median of 3 ranks that do the same work" in text
    head = next(at for at, line in enumerate(lines) if line.split()[:1] == ["phase"])
    assert lines[head].split() == ["phase", "here", "others", "difference"]
    name, here, others, difference = lines[head + 1].split()
    assert name == "forward"
    assert float(here) - float(others) == pytest.approx(float(difference), abs=1.5)
    assert difference.startswith("+")
    modules = next(at for at, line in enumerate(lines) if line.split()[:1] == ["module"])
    assert lines[modules + 1].split()[-1].startswith("+")
    assert any("allreduce" in line for line in lines)


def test_screen_of_a_dead_rank_shows_its_death_and_open_span(view: View) -> None:
    ranks: Any = [
        {**rank, "state": "died", "inside": ["forward GPT"]} for rank in report_of(view)["ranks"]
    ]

    assert "  died inside forward GPT" in of_rank(with_report(view, ranks=ranks), 1)


def test_rank_screen_without_data_says_so(view: View) -> None:
    assert of_rank(view, 7)[0].startswith("No data of rank 7")


def test_rank_is_compared_only_with_ranks_of_its_pipeline_stage(tmp_path: Path) -> None:
    """The pipeline has two stages of two ranks."""
    found = view_of(tmp_path / "run", 6, blocks=2, stages=2)

    assert "median of 2 ranks that do the same work" in joined(of_rank(found, 0))


def test_findings_on_a_rank_are_on_its_screen(view: View) -> None:
    assert any("SLOW RANK" in line for line in of_rank(view, 3))
    assert not any("SLOW RANK" in line for line in of_rank(view, 2))


def test_screen_of_all_findings_has_their_durations(view: View) -> None:
    text = joined(plain(overview.all_finding_lines(view, 100)))

    assert re.search(
        r"seen in \d+ of the run's \d+ judged windows of \d+ steps, since step 0", text
    )


def test_times_of_other_days_are_shown_with_the_date() -> None:
    assert len(overview.format_clock_time("2001-09-09T01:46:40+00:00", now_s=1e9 + 3600)) == len(
        "12:00:00"
    )
    assert len(overview.format_clock_time("2001-09-09T01:46:40+00:00", now_s=2e9)) == len(
        "2001-09-09 01:46"
    )
