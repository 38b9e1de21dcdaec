"""What the screens say: the same facts as the report's, and nothing that is not known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from tests.top.reports import changed, report_of, verdict, view_of
from torchlens_perf.top import overview
from torchlens_perf.top.frame import frame
from torchlens_perf.top.help_text import help_lines
from torchlens_perf.top.lettering import Lettering
from torchlens_perf.top.pace import Pace
from torchlens_perf.top.rank_lines import rank_lines
from torchlens_perf.top.reading import View
from torchlens_perf.verdicts.words.hang import HangEvidence

UNICODE, ASCII = Lettering(), Lettering(ascii_only=True)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    """Four ranks on two nodes, of which rank 3 is slow."""
    folder = tmp_path_factory.mktemp("frame")
    return view_of(folder / "run", 4, "constant:rank=3,share=0.3,phase=forward", blocks=3, node_size=2)


def shown(view: View, width: int = 100, lettering: Lettering = UNICODE) -> list[str]:
    return plain(frame(view, width, lettering))


def of_rank(view: View, rank: int, width: int = 100) -> list[str]:
    return plain(rank_lines(view, rank, width, UNICODE))


def plain(lines: list[Text]) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def with_report(view: View, **parts: Any) -> View:
    return dataclasses.replace(view, report=changed(report_of(view), **parts))


def test_frame(view: View) -> None:
    """Who is slow with what to do, each rank, the parts of the step with who has most, what the data are worth."""
    text, words = "\n".join(shown(view)), " ".join(" ".join(shown(view)).split())
    said = report_of(view)["verdicts"][0]["text"].partition(" Next: ")[0]

    assert said in words
    assert "  Next: compare" in text
    assert "3 S  +3" in text
    assert "S slow" in text
    assert "forward" in text
    assert " 3: " in text
    assert "data: 0 of 5,760 records lost, 100.0% of steps whole   this tool cost below 0.01% of the steps" in text


@pytest.mark.parametrize("width", [1, 10, 20, 40, 80, 200])
@pytest.mark.parametrize("lettering", [UNICODE, ASCII])
def test_no_line_is_wider_than_the_terminal(view: View, width: int, lettering: Lettering) -> None:
    lines = shown(view, width, lettering)

    assert max(map(len, lines)) <= width
    assert lettering is UNICODE or all(line.isascii() for line in lines)


def test_live_and_ended(view: View, tmp_path: Path) -> None:
    """A run says that it is live and as of when, or that it has ended, when, and with how many ranks dead."""
    assert overview.run_state(view)[0].startswith("LIVE ")
    run = {"live": False, "ended": "2026-11-23T09:00:00+00:00"}
    ranks: Any = [{**rank, "state": "closed"} for rank in report_of(view)["ranks"]]
    at = overview.clock_time(overview.seconds_of("2026-11-23T09:00:00+00:00"))
    assert overview.run_state(with_report(view, **run, ranks=ranks)) == (f"ENDED {at}", "bold")
    dead = {**run, "died": [2], "ranks_seen": 4}
    assert overview.run_state(with_report(view, **dead, ranks=ranks))[0] == f"ENDED {at}, rank 2 died"
    assert overview.run_state(with_report(view, died=[2]))[0].endswith(", rank 2 died")


def test_hang_shows_no_pace(view: View) -> None:
    """Steps a second, and how long is left, are of a run that makes steps."""
    evidence = HangEvidence("missing", 42.0, 40, (1,), (0, 2), {})
    hangs = with_report(view, verdicts=[verdict("hang", "No step for 42 s.", rank=1, evidence=evidence)])
    hangs = dataclasses.replace(hangs, pace=dataclasses.replace(hangs.pace or Pace(None, None, None), total=1000))

    assert overview.run_state(hangs)[0].startswith("HANG: no step for 42.0 s at ")
    first, _ = plain(overview.pace_lines(hangs, 100, UNICODE))
    assert first.startswith("96 of 1,000 steps (9.6%)   p50 ")
    assert "left" not in first
    assert "steps/s" not in first


def test_time_left_is_shown_where_it_is_known(view: View) -> None:
    """A run that says how many steps it makes; the same run that does not say it."""
    assert view.pace is not None
    told = dataclasses.replace(view, pace=dataclasses.replace(view.pace, total=1000))

    assert "left" not in plain(overview.pace_lines(view, 100, UNICODE))[0]
    assert "min left" in plain(overview.pace_lines(told, 100, UNICODE))[0]


def test_not_measured_is_not_zero(view: View) -> None:
    """A part that nothing tells apart has no time, and an overhead that is not known is not 0."""
    ranks: Any = [
        {**rank, "not_measured": ["communication"], "phases": {"forward": rank["phases"]["forward"]}}
        for rank in report_of(view)["ranks"]
    ]
    quality: Any = {**report_of(view)["quality"], "overhead_share": None}
    text = "\n".join(shown(with_report(view, ranks=ranks, quality=quality)))

    assert "wait      not measured: part of backward" in text
    assert "this tool cost not measured" in text
    assert "wait      not measured: part of backward" in "\n".join(of_rank(with_report(view, ranks=ranks), 0))


def test_before_the_first_step(view: View) -> None:
    """What cannot be known yet is said to be so."""
    ranks: Any = [
        {**rank, "phases": {}, "typical": None, "last_step": None, "steps": 0, "coverage": 0.0}
        for rank in report_of(view)["ranks"]
    ]
    steps: Any = {**report_of(view)["steps"], "p50_s": None, "count": 0}
    none = dataclasses.replace(with_report(view, ranks=ranks, steps=steps, heat=None), pace=Pace(None, None, None))
    lines = shown(none)

    assert lines[1:3] == ["no step yet", "step time: no curve before two windows of steps"]
    assert "no step yet that is no warm-up" in lines
    for said in ("\n".join(lines), "\n".join(of_rank(none, 0))):
        assert "records lost, no step was recorded" in said
        assert "0.0% of" not in said


def test_rank(view: View) -> None:
    """Where it is, what it does now, its parts and modules beside those of others, what it waits for, its memory."""
    now = {"step": 97, "step_s": 0.12, "inside": ["backward", "wait"], "inside_s": 0.1}
    ranks: Any = [{**rank, "now": now} for rank in report_of(view)["ranks"]]
    lines = of_rank(with_report(view, ranks=ranks), 3)
    text = "\n".join(lines)

    assert lines[0].startswith("rank 3 (local rank 1) on node-0001, pid ")
    assert "in step 97 for 120 ms, inside backward > wait for 100 ms" in text
    assert "its step by the host, beside the median of 3 that do the same work" in text
    (forward,) = [line for line in lines if line.startswith("forward ")]
    here, others, more = (float(word) for word in forward.split()[1::2])
    assert here - others == pytest.approx(more, abs=1.5)
    assert more > 30
    (layer,) = [line for line in lines if line.startswith("layers.0")]
    assert layer.split()[-2].startswith("+")
    assert "allreduce of ranks 0-3" in text
    assert lines[-1] == "not measured"  # memory, of simulated ranks


def test_rank_that_died(view: View) -> None:
    ranks: Any = [{**rank, "state": "died", "inside": ["forward GPT"]} for rank in report_of(view)["ranks"]]

    assert "died inside forward GPT" in of_rank(with_report(view, ranks=ranks), 1)


def test_rank_of_which_nothing_is_known(view: View) -> None:
    assert of_rank(view, 7)[0].startswith("Nothing has been heard of rank 7")


def test_ranks_that_do_other_work_are_no_measure(tmp_path: Path) -> None:
    """Of a pipeline's two stages, a rank stands beside the one rank of its own."""
    found = view_of(tmp_path / "run", 4, blocks=2, stages=2)

    assert "beside another's that does the same work" in "\n".join(of_rank(found, 0))


def test_verdicts_on_a_rank_are_on_its_screen(view: View) -> None:
    assert any("Rank 3 (node-0001) is slow" in line for line in of_rank(view, 3))
    assert not any("Rank 3 (node-0001) is slow" in line for line in of_rank(view, 2))


def test_help_says_why_no_time_is_left() -> None:
    assert "callbacks for Lightning" in "\n".join(plain(help_lines(["x"], 80, UNICODE)))


def test_times_of_other_days() -> None:
    """With the day, where it is not the last one."""
    assert overview.clock_time(None) == ""
    assert len(overview.clock_time(1e9, now_s=1e9 + 3600)) == len("12:00:00")
    assert len(overview.clock_time(1e9, now_s=2e9)) == len("2001-09-09 01:46")
