"""What rank 0 prints at the end: few lines of a healthy run, and of another the verdict and its evidence first."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.report import test_memory_table as memory
from tests.report.test_held import node, usual
from tests.support.findings import episode, findings, hang, hung
from tests.support.ranks import Rank, read_to_end
from tests.support.reports import checked
from tests.support.tables import records
from tests.verdicts.words.test_bottleneck import BASE, random_steps
from torchlens_perf.report.brief import MAX_LINES, brief
from torchlens_perf.report.build import build
from torchlens_perf.report.verdict_text import earlier_line
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import REPORT, Mailbox
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.sidecar.start.process import write_report
from torchlens_perf.verdicts.node_state import NodeState
from torchlens_perf.verdicts.words.hang import RankStack
from torchlens_perf.verdicts.words.report import VerdictRow

LONG = "/lustre/projects/some-team/experiments/torchlens-perf/20261122-223230-760cafb6"


def short(state: NodeState, columns: int = 80, **more: Any) -> str:
    return brief(checked(build("r", [state])), LONG, columns=columns, color=False, **more)


def with_all(state: NodeState) -> NodeState:
    """The node with several models, sections, a slow start, and much that its data lacks."""
    names = [f"discriminator.blocks.{place}.attention" for place in range(40)]
    for process in state.processes.values():
        of = process.statistics
        of._add_named(records([(Kind.SECTION, 1, 20, 5)]), ["", "augment"])
        of.modules.update(dict.fromkeys(names, of.step))
        of.usual_steps, of.lost = 60, 20
        process.notes += [f"note {place} that is as long as notes on what was not recorded are" for place in range(9)]
    return state


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_run_is_short(seed: int, columns: int) -> None:
    """Whatever the loop does: evaluation, noise, ranks that were slow, waits for a while, hangs that went by."""
    rng = np.random.default_rng(seed)
    loops = random_steps(rng, 300, 8)
    for loop in loops:
        for step in range(80, 160):
            loop[step]["data"] = loop[step].get("data", 0.0) + 300.0 * (seed % 2)
        for step in range(30, 300, 50):
            loop[step]["host"] = loop[step].get("host", 0.0) + 9000.0
            loop[step]["flags"] = int(Flag.EVALUATION)
    past = [episode(rank, 20 + 10 * rank, 45 + 10 * rank) for rank in range(8)]
    state = with_all(node(loops, findings(*past, last_step=299), records=hung(60.0, over=True)))
    text = short(state, columns)

    assert text.count("\n") <= MAX_LINES
    assert f"\nthis is the short form; all of it: torchlens-perf report {LONG}\n" in text
    words = " ".join(text.split())
    assert "No rank stands out over 300 steps." in words
    assert "Earlier in this run: " in words
    assert "notes in the full report" in words
    assert all(len(line) <= columns for line in text.splitlines() if "short form" not in line)


def test_no_more_than_it_has() -> None:
    """Of a run where nothing is to be said, nothing is: title, verdicts, steps, data quality, and where the rest is."""
    lines = short(node([usual(60)] * 8, findings(last_step=59)), 120).splitlines()

    assert len(lines) <= 12
    assert lines[0].startswith("torchlens_perf  train.py, run r: 8 ranks")
    assert "Held" not in "".join(lines)
    assert "earlier" not in "".join(lines).lower()
    assert lines[-1] == f"this is the short form; all of it: torchlens-perf report {LONG}"


def test_verdicts_that_have_no_room_are_counted() -> None:
    """None is left out in silence."""
    loop = usual(300)
    for every, flag in ((17, Flag.EVALUATION), (41, Flag.CHECKPOINT)):
        for step in range(every, 300, every):
            loop[step] = {**BASE, "host": 300.0, "flags": int(flag)}
    text = short(node([loop] * 8, findings(last_step=299)), 48)
    words = " ".join(text.split())

    assert text.count("\n") <= MAX_LINES
    assert "more verdict" in words


def test_the_page_is_named_if_there_is_one() -> None:
    state = node([usual(60)])
    assert "page" not in short(state)
    assert short(state, page=f"{LONG}/report.html").endswith(f"{LONG}\nsoon also as a page: {LONG}/report.html\n")


@pytest.mark.parametrize("html", [True, False])
def test_what_rank_0_gets(html: bool, run: RunDirectory, tmp_path: Path) -> None:
    """The short form as its terminal wants it; report.txt is whole, without colours."""
    rank = Rank(run, 0, 1)
    rank.steps(50, forward=4, backward=6)
    rank.close()
    read_to_end(run)
    mailbox = Mailbox(tmp_path / "rank.ring", REPORT)
    write_report(run, {"mailbox": str(mailbox.path), "columns": 80, "color": True, "writes_page": html})
    text = mailbox.wait(5)
    mailbox.close()

    assert text is not None
    assert "\x1b[" in text
    assert f"torchlens-perf report {run.path}" in text
    assert (f"soon also as a page: {run.path}/report.html" in text) is html
    assert "typical step of each rank" not in text
    whole = run.report.read_text()
    assert "\x1b[" not in whole
    assert "typical step of each rank" in whole


def test_of_a_slow_rank_the_verdict_and_the_evidence_come_first() -> None:
    """Sentence, since when, next action; then the table of ranks with that one first. What is beside it is left out."""
    loops = [usual(160) for _ in range(12)]
    loops[9] = [{**BASE, "backward": 28.0 if step >= 64 else 8.0} for step in range(160)]
    text = short(with_all(node(loops, findings(episode(9, 64, last_step=159)))), 120)
    lines = text.splitlines()
    places = [
        next(place for place, line in enumerate(lines) if words in line)
        for words in (
            "Rank 9 is slow",
            "Held in 12 of 20 windows",
            "Next: ",
            "160 steps",
            "typical step",
            "data quality",
        )
    ]

    assert places == sorted(places)
    assert places[0] == 2
    ranks = [line.split()[0] for line in lines[places[4] :] if line.startswith(" ") and line.split()[0].isdecimal()]
    assert ranks[0] == "9"
    assert len(ranks) == 8
    assert "augment" not in text


def test_a_slow_rank_is_in_the_table_whatever_it_takes() -> None:
    """One that is slow now and then has a typical step like the others'."""
    loops = [[{**BASE, "backward": 8.0 + rank} for _ in range(60)] for rank in range(12)]
    lines = short(node(loops, findings(episode(0, 20, last_step=59))), 120).splitlines()
    header = next(place for place, line in enumerate(lines) if line.startswith(" rank  "))

    assert [line.split()[0] for line in lines[header + 2 : header + 5]] == ["0", "5", "6"]


def test_what_no_longer_limits_the_step_is_said_so() -> None:
    """Of what limits the step, since when is in the full report. What is over by now is said to be earlier."""
    over = [{**BASE, "data": 20.0 if step < 320 else 1.0} for step in range(400)]

    assert "Held" not in short(node([[{**BASE, "data": 20.0}] * 400]))
    assert "Earlier in this run: Waiting for data takes 5" in " ".join(short(node([over])).split())


def test_of_a_hang_the_stacks_are_there() -> None:
    """And of a job whose memory ran out, the table of what held it."""
    hung = dataclasses.replace(hang(57), stacks={2: RankStack(("train.py:3",), "")})
    text = short(node([usual(57)] * 2, hang=hung, ended=""))
    assert text.index("Rank 2 did not enter it.") < text.index("Next: ") < text.index("train.py:3")
    assert text.index("train.py:3") < text.index("57 steps")

    text = short(node([usual(57)], out_of_memory=memory.oom(step=99, file="f")))
    assert text.index("ran out of device memory") < text.index("Next: ") < text.index("57 steps")


def test_a_run_that_ended_in_a_hang_is_no_healthy_one() -> None:
    text = short(node([usual(57)] * 2, records=hung(60.0, over=True)))

    assert "The job hung in step 57 for 60.0 s, and ended in it." in " ".join(text.split())
    assert "typical step of each rank" in text


def test_what_is_over_is_one_sentence() -> None:
    """With one period, whatever its text has: a cost after a colon, or nothing."""
    stretch = cast(VerdictRow, {"text": "Waiting took 5% from step 2 to 9; in the rest of the run, 3 ms."})
    straggler = cast(VerdictRow, {"text": "Rank 3 was slow: 5 ms a step, from step 2 to 9."})
    assert earlier_line([stretch]).endswith("the run, 3 ms.")
    assert earlier_line([straggler, stretch]) == "Earlier in this run: Rank 3 was slow, and 1 more."
