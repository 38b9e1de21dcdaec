"""The short and the full report in a terminal: their content, and their largest size."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tests.diagnosis import test_goodput as goodput
from tests.report import test_memory_table as memory
from tests.report.test_held import node, usual
from tests.support import progress
from tests.support.findings import episode, findings, hang, hung
from tests.support.ranks import Rank, read_to_end
from tests.support.reports import checked
from tests.support.tables import records
from tests.verdicts.words.test_bottleneck import BASE, random_steps
from tests.view.test_headline import simulated
from torchlens_perf.analysis.collectives.hang import find_hang
from torchlens_perf.page.run_results import write_report
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import REPORT, Mailbox
from torchlens_perf.run.rank_facts import RankFacts, ReportRequest, SidecarSettings
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.verdicts.node_state import NodeState
from torchlens_perf.verdicts.stragglers.findings import Cause, Diagnosis
from torchlens_perf.verdicts.words.hang import RankStack, describe_hang
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.specs import Column, Quantity, Table
from torchlens_perf.view.terminal import (
    REPORT_LINES,
    SHORT_LINES,
    print_report,
    render_full,
    render_short,
    table_lines,
)

LONG = "/lustre/projects/some-team/experiments/torchlens-perf/20261122-223230-760cafb6"
COPIED = ("full report", "web page", "torchlens-perf capture", "export TORCHLENS_PERF_CAPTURE")
SHORT_LINES_OK = 20
"""The most lines of a short report in which nothing is wrong."""


def short(report: NodeState | Report, columns: int = 80, **more: Any) -> str:
    made = checked(build_report("r", [report])) if isinstance(report, NodeState) else report
    text = render_short(made, LONG, columns=columns, color=False, **more)
    for line in text.splitlines():
        assert len(line) <= columns or any(words in line for words in COPIED) or LONG in line, line
        assert line == line.rstrip()
    return text


def words(text: str) -> str:
    return " ".join(text.split())


def with_all(state: NodeState) -> NodeState:
    """Add many modules, a section, lost records, and notes to the node."""
    names = [f"discriminator.blocks.{place}.attention" for place in range(40)]
    for process in state.processes.values():
        of = process.statistics
        of._add_named_sections(records([(Kind.SECTION, 1, 20, 5)]), ["", "augment"])
        of.modules.update(dict.fromkeys(names, of.step))
        of.usual_steps, of.lost = 60, 20
        process.facts.notes += [
            f"note {place} that is as long as notes on what was not recorded are"
            for place in range(9)
        ]
    return state


class TestPlantedJobs:
    """Reports of jobs with a planted fault, and of one without a fault."""

    def test_short_report_of_a_slow_rank_has_cost_and_action(self, tmp_path: Path) -> None:
        report = simulated(tmp_path, "constant:rank=1,share=0.27,phase=forward", ranks=2)
        text = short(report)
        lines = text.splitlines()

        assert lines[0].startswith("torchlens_perf  simulation  2 ranks, 120 steps, ended after ")
        assert re.fullmatch(
            r"  SLOW RANK   rank 1 \(node-0000\)   forward   since step 0", lines[2]
        )
        assert re.fullmatch(
            r"  cost        [0-9.]+ ms per step = \d+% of a mean step of [0-9.]+ ms", lines[3]
        )
        assert re.search(
            r" evidence Rank 1 computes [0-9.]+ ms per step, the other rank [0-9.]+ ms\.",
            words(text),
        )
        assert "Seen slow in 100% of the steps since then." in words(text)
        assert "\n  next        compare the input sizes of the model on rank 1 " in text
        assert "\n              export TORCHLENS_PERF_CAPTURE=verdict  # then rerun the job" in text
        assert lines[-1] == f"  full report torchlens-perf report {LONG} --all"
        rows = [line.split()[0] for line in text.partition("  rank  step")[2].splitlines()[1:3]]
        assert rows == ["1", "0"]
        assert len(lines) <= SHORT_LINES

    def test_slow_loader_of_one_process_is_the_bottleneck(self) -> None:
        text = short(node([[{**BASE, "data": 14.0}] * 100]))

        assert text.splitlines()[2].startswith("  BOTTLENECK  data loading")
        assert "\n  cost        14.0 ms per step = 48% of a typical step of 29.0 ms\n" in text
        assert "a batch" in text.partition("\n  next ")[2].splitlines()[0]
        assert "data 48%" in text
        assert not re.search(
            "rank|comm wait|last to arrive", text.partition("\n  step ")[2].partition("full")[0]
        )
        assert text.count("\n") <= SHORT_LINES_OK

    def test_slow_loader_is_shown_before_the_line_on_slow_ranks(self) -> None:
        """The line on slow ranks says that no rank is slow."""
        loops = [[{**BASE, "data": 14.0}] * 100] * 2
        text = short(node(loops, findings(last_step=99, compared=2)))

        assert text.splitlines()[2].startswith("  BOTTLENECK  data loading")
        assert "\n  cost        14.0 ms per step = 48% of a typical step of 29.0 ms\n" in text
        assert "a batch" in text.partition("\n  next ")[2].splitlines()[0]
        assert "\n  OK          No slow rank in 100 steps." in text
        assert "Typical step of each rank" not in text
        assert text.count("\n") <= SHORT_LINES_OK

    def test_short_report_of_a_clean_run_is_ok(self, tmp_path: Path) -> None:
        text = short(simulated(tmp_path), page=f"{LONG}/report.html")

        assert "OK No slow rank in 120 steps. The smallest detectable slowdown is " in words(text)
        assert "cost" not in text
        assert "next look first at embedding, the module with the most time of its own (" in words(
            text
        )
        assert text.endswith(
            f"  full report torchlens-perf report {LONG} --all\n  web page    {LONG}/report.html\n"
        )
        assert text.count("\n") <= SHORT_LINES_OK


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("seed", range(8))
def test_full_report_of_a_run_without_open_finding_is_short(seed: int, columns: int) -> None:
    """The loops have evaluation, noise, and slow ranks, waits and hangs that are over."""
    rng = np.random.default_rng(seed)
    loops = random_steps(rng, 300, 8)
    for loop in loops:
        for step in range(80, 160):
            loop[step]["data"] = loop[step].get("data", 0.0) + 300.0 * (seed % 2)
        for step in range(30, 300, 50):
            loop[step]["host"] = loop[step].get("host", 0.0) + 9000.0
            loop[step]["flags"] = int(Flag.EVALUATION)
    past = [episode(rank, 20 + 10 * rank, 45 + 10 * rank) for rank in range(8)]
    text = short(
        with_all(node(loops, findings(*past, last_step=299), records=hung(60.0, over=True))),
        columns,
    )

    assert text.count("\n") <= SHORT_LINES
    assert "\n  earlier " in text
    assert "\n  data lost " in text


def test_report_omits_sections_without_data() -> None:
    text = short(node([usual(60)] * 8, findings(last_step=59)), 120)

    assert text.count("\n") <= 13
    assert not re.search("earlier|data lost|also|Typical step", text)


@pytest.mark.slow
def test_report_of_64_ranks_with_a_slow_one_is_short(tmp_path: Path) -> None:
    report = simulated(tmp_path, "constant:rank=13,share=0.25", ranks=64, steps=64)
    text = short(report)

    assert text.count("\n") <= SHORT_LINES
    assert re.search(r"\n  5\d ranks not shown: compute \d+ to \d+ ms\n", text)
    assert text.partition("  rank  ")[2].splitlines()[1].split()[0] == "13"
    whole = render_full(report, LONG, columns=100, color=False)
    assert whole.count("\n") <= 90
    assert "\n  56 ranks not shown: compute " in whole


def test_report_of_a_run_with_all_findings_is_short() -> None:
    """Ranks are left out if other lines need the room."""
    slow = [episode(rank, 20, last_step=159) for rank in range(4)]
    past = [episode(rank, 20, 50) for rank in range(4, 8)]
    seen = Diagnosis(
        (),
        ("garbage collection", "memory pressure", "waits for a CPU", "waits for a disk"),
        (),
        {},
        {},
    )
    state = with_all(node([usual(160)] * 24, findings(*slow, *past, last_step=159)))
    groups = tuple(dataclasses.replace(group, diagnosis=seen) for group in state.findings.groups)
    state.findings = dataclasses.replace(state.findings, groups=groups)
    text = short(state, page=f"{LONG}/report.html")

    assert text.count("\n") <= SHORT_LINES


def test_length_of_a_report_of_1024_ranks_is_bounded(tmp_path: Path) -> None:
    report = simulated(tmp_path, "constant:rank=3,share=0.25", ranks=8)
    report["ranks"] = [{**report["ranks"][at % 8], "rank": at} for at in range(1024)]
    report["run"]["world_size"] = report["run"]["ranks_seen"] = 1024
    report["quality"]["notes"] = [f"note {at}" for at in range(1024)]

    assert short(report).count("\n") <= SHORT_LINES
    assert render_full(report, LONG, columns=100, color=False).count("\n") <= 110


def test_only_the_status_of_verdicts_after_the_third_is_shown() -> None:
    slow = findings(*(episode(rank, 20, last_step=159) for rank in range(4)), last_step=159)
    text = short(node([usual(160)] * 8, slow))

    assert len(re.findall(r"\n  SLOW RANK   ", text)) == 3
    assert text.splitlines()[1].endswith(" + SLOW RANK 3")


def test_second_and_third_verdicts_have_evidence_and_action() -> None:
    loop = [{**BASE, "data": 6.0} for _ in range(200)]
    for every, begin, more, flag in (
        (20, 10, 300.0, Flag.EVALUATION),
        (40, 15, 80.0, Flag.CHECKPOINT),
    ):
        for step in range(begin, 200, every):
            loop[step] = {**loop[step], "host": more, "flags": int(flag)}
    text = short(node([loop] * 2, findings(last_step=199, compared=2)))

    assert re.fullmatch(
        r"  status      LONG STEPS: \d+% \+ BOTTLENECK: data loading, \d+% \+ LONG STEPS: [0-9.]+%",
        text.splitlines()[1],
    )
    assert text.splitlines()[3].startswith("  LONG STEPS  ")
    assert re.search(
        r"\n  BOTTLENECK  data loading, [0-9.]+ ms per step \(\d+% of a typical step of [0-9.]+ ms\),.*\n"
        r"(  {12}.*\n)*  evidence    .*\n(  {12}.*\n)*  next        .*\n"
        r"(  {12}.*\n)*  LONG STEPS  .*\n(  {12}.*\n)*  cost  .*\n  next  ",
        text,
    )


def test_ended_verdicts_are_shown_in_one_line() -> None:
    over = [{**BASE, "data": 20.0 if step < 320 else 1.0} for step in range(400)]
    slow = findings(episode(3, 20, 50), episode(2, 60, 90), last_step=159)
    text = short(node([usual(160)] * 4, slow))

    assert re.search(
        r" earlier no action needed: data loading, [0-9.]+ ms per step \(5\d% of a typical step of"
        r" [0-9.]+ ms\), from step 0 to 319 ",
        words(short(node([over]))),
    )
    assert re.search(
        r"\n  earlier     no action needed: SLOW RANK rank [23] \(h\), [0-9.]+ ms per step \(.*\n",
        text,
    )


def test_cause_of_a_slow_rank_has_its_own_line() -> None:
    seen = Diagnosis((), ("garbage collection", "memory pressure"), (), {}, {})
    gc = Cause("gc", 0.8, {"gc_share": 0.09}, {})
    state = node(
        [usual(160)] * 2, findings(episode(1, 20, last_step=159), last_step=159, compared=2)
    )
    (group,) = state.findings.groups
    reports = {}
    for name, causes in (("none", ()), ("gc", (gc,))):
        diagnosed = dataclasses.replace(group, diagnosis=dataclasses.replace(seen, causes=causes))
        state.findings = dataclasses.replace(state.findings, groups=(diagnosed,))
        reports[name] = short(state)

    assert (
        "\n  cause       none found (checked: garbage collection, memory pressure).\n"
        in reports["none"]
    )
    assert "\n  cause       Python's garbage collector takes 9" in reports["gc"]
    assert "\n  next        call gc.freeze() after the model is built" in reports["gc"]


def test_ranks_that_differ_are_shown_without_a_verdict() -> None:
    loops = [
        [{**BASE, "backward": 8.0 + 4 * rank, "communication": 4.0 - 4 * rank} for _ in range(20)]
        for rank in (0, 1)
    ]

    assert "Typical step of each rank" in short(node(loops))
    assert "Typical step of each rank" not in short(node([usual(20)] * 2))


def test_stacks_of_a_hang_are_shown() -> None:
    waiting = structs.replace(hang(57), stacks={2: RankStack(("train.py:3",), "")})
    text = short(node([usual(57)] * 2, hang=waiting, ended=""))

    assert (
        text.index("  HANG ")
        < text.index("  next ")
        < text.index("train.py:3")
        < text.index("  step ")
    )


def test_long_stacks_of_a_hang_leave_room_for_the_rest() -> None:
    stack = RankStack(tuple(f"function_{at} (train.py:{at})" for at in range(15)), "")
    waiting = structs.replace(hang(57), stacks=dict.fromkeys(range(4), stack))
    state = node([usual(57)] * 2, hang=waiting, ended="")

    assert short(state).count("\n") <= SHORT_LINES
    assert (
        render_full(checked(build_report("r", [state])), LONG, columns=100, color=False).count(
            "function_14"
        )
        == 4
    )


def test_memory_of_a_rank_that_ran_out_is_shown() -> None:
    text = short(node([usual(57)], out_of_memory=memory.oom(step=99, file="f")))

    assert "in step 99" in text.split("evidence")[0]
    assert (
        text.index("  OUT OF MEMORY  ")
        < text.index("  next ")
        < text.index("Memory of rank 1 when it ran out")
    )
    assert "Net > Block > Mlp, train.py:12 forward" in text
    assert text.count("\n") <= SHORT_LINES


def test_run_that_ended_in_a_hang_is_shown_as_hanging() -> None:
    text = short(node([usual(57)] * 2, records=hung(60.0, over=True)))

    assert text.splitlines()[2].startswith("  HANG ")
    assert "The job hung in step 57 for 60.0 s, and did not continue." in words(text)


def test_hang_that_is_over_has_its_cost_once() -> None:
    text = words(short(node([usual(77)] * 2, records=hung(60.0, over=True))))

    assert "cost 60.0 s = 100% of all step time evidence" in text
    assert text.count("of all step time") == 1


@pytest.mark.parametrize("html", [True, False])
def test_rank_0_prints_the_short_report(html: bool, run: RunDirectory, tmp_path: Path) -> None:
    """The colours are those that the terminal of rank 0 supports.

    report.txt has the full report without colours.
    """
    rank = Rank(run, 0, 1)
    rank.steps(50, forward=4, backward=6)
    rank.close()
    read_to_end(run)
    mailbox = Mailbox(tmp_path / "rank.ring", REPORT)
    request = ReportRequest(mailbox=str(mailbox.path), columns=80, color=True)
    write_report(run, RankFacts(settings=SidecarSettings(writes_page=html), report=request))
    text = mailbox.wait_for_message(5)
    mailbox.close()

    assert text is not None
    assert "\x1b[" in text
    assert f"torchlens-perf report {run.path}" in text
    assert (f"{run.path}/report.html" in text) is html
    assert "Typical step" not in text
    whole = run.report.read_text()
    assert "\x1b[" not in whole
    assert "  Typical step" in whole


def test_each_colour_has_one_meaning(tmp_path: Path) -> None:
    """The status has the colour of its severity, each part of a bar its own, and the slow row that
    of the status.
    """
    report = simulated(tmp_path, "constant:rank=3,share=0.25,phase=forward")
    text = render_short(report, LONG, columns=80, color=True)

    assert "\x1b[1;31mSLOW RANK" in text
    assert re.search("\x1b\\[32m█+\x1b\\[0m\x1b\\[34m▓+", text)  # Forward and backward.
    assert re.search("\x1b\\[1;31m +3", text)


def test_output_without_block_characters_is_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_report(checked(build_report("r", [node([usual(60)] * 2)])), file, "x")
    file.seek(0)

    assert re.search(r"\n  time        [#=]+%+", file.read())


def test_long_cells_are_broken_between_words_and_after_punctuation() -> None:
    text = "Save with torch.distributed.checkpoint, see a_very_long_name_without_any_end_at_all."
    table = Table("t", "T", [Column("advice", [text], Quantity.TEXT), Column("gain", [0.1])])
    lines = [line.plain for line in table_lines(table, 40, 1)][2:]
    cells = [line[2:].removesuffix("100").strip() for line in lines]

    assert all(len(line) <= 40 for line in lines)
    assert "torch.distributed.checkpoint," in cells
    assert " ".join(cells).replace("_ ", "_") == text


def test_unbreakable_word_is_cut_at_the_width() -> None:
    table = Table("t", "T", [Column("name", ["x" * 50], Quantity.TEXT), Column("n", ["1"])])
    cells = [line.plain.split()[0] for line in table_lines(table, 26, 1)[2:]]
    assert ("".join(cells), max(map(len, cells))) == ("x" * 50, 21)


def test_hang_of_many_ranks_shows_groups_of_ranks_with_their_lines_of_code() -> None:
    """Lines are known on one node only. Ranks on other nodes are a group of their own."""
    ranks = {each: progress.rank(each, host=f"node-{each // 8}") for each in range(1024)}
    stuck = find_hang({**ranks, 7: progress.behind(7, host="node-0")}, {})
    assert stuck is not None
    lines = {**dict.fromkeys(range(7), "train.py:57 in main"), 7: "data.py:12 in load_batch"}
    report = checked(
        build_report("r", [node([usual(57)] * 2, hang=describe_hang(stuck, {}, lines), ended="")])
    )
    report["run"]["world_size"] = 1024
    text = short(report, 100)

    assert re.search(
        r"\n  where       rank 7: inside forward GPT > blocks\.3, data\.py:12 in load_batch"
        r"\n              ranks 0-6: allreduce 57 of group 0, inside backward, train\.py:57 in main"
        r"\n              ranks 8-1023: allreduce 57 of group 0, inside backward"
        r"\n  lost        12\.0 s on 1024 ranks \(3 h 24 min of rank time\)\n",
        text,
    )
    assert re.search(r"\n  HANG        rank 7   since step 100   at [0-9:]{8} \w+\n", text)
    assert text.count("\n") <= SHORT_LINES


def test_status_names_all_problems_if_there_are_several() -> None:
    """There is no such line for one problem. A problem that is over is left out."""
    loops = [[{**BASE, "data": 14.0}] * 200] * 2
    slow = findings(episode(1, 20, last_step=199), last_step=199, compared=2)
    lines = short(node(loops, slow)).splitlines()

    assert lines[1] == "  status      BOTTLENECK: data loading, 48% + SLOW RANK 1: backward, 15%"
    assert "  status " not in short(node(loops, findings(episode(1, 20, 50), last_step=199)))


def test_report_has_40_lines_and_all_tables_only_if_asked(tmp_path: Path) -> None:
    report = simulated(tmp_path, "constant:rank=1,share=0.27,phase=forward", ranks=8)
    report["quality"]["notes"] = ["a note", "another one"]
    texts = {}
    for whole in (False, True):
        file = io.StringIO()
        print_report(report, file, LONG, whole=whole)
        texts[whole] = file.getvalue()

    assert texts[False].count("\n") <= REPORT_LINES < texts[True].count("\n")
    assert "Typical step of each rank" in texts[False]
    assert "; 2 notes\n" in texts[False]
    assert f"torchlens-perf report {LONG} --all\n" in texts[False]
    assert "a note" in texts[True]
    assert "Goodput" in texts[True]


def test_failed_run_shows_what_was_lost_since_the_last_checkpoint() -> None:
    steps = [dict(goodput.TRAIN) for _ in range(60)]
    steps[40]["flags"] = int(Flag.CHECKPOINT)
    text = words(short(goodput.state_of(goodput.process(steps, ended="died"))))

    assert "lost 20 steps (2.00 s) since the last recorded checkpoint" in text
