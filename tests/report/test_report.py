"""The report: its JSON, its sentences, and its look in a terminal and elsewhere."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import HOST, Rank, identity_of, make_run
from tests.support.reports import as_json, checked
from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.exporters import Exporter
from torchlens_perf.report.build import SCHEMA, build_report
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.view.terminal import print_report, render_full

WORK = {"data": 1, "forward": 4, "communication": 2, "backward": 6, "host": 1}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


def report_on(
    run: RunDirectory, ranks: list[Rank], exporter: Exporter | None = None
) -> dict[str, Any]:
    """Return the report on ended ranks after checking it against the schema."""
    for rank in ranks:
        rank.close()
    sidecar = Sidecar(run, HOST, exporter, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.judge_ranks(1e6, final=True)
    sidecar.save_records()
    sidecar.close()
    return checked(build_report(run.run_id, [sidecar.state]))


def test_report_has_the_documented_fields_as_plain_json(run: RunDirectory) -> None:
    """Names of the top level and of fields that other programs use are fixed."""
    ranks = [Rank(run, rank) for rank in range(2)]
    for rank in ranks:
        rank.session.recorder.record_span(Kind.MODULE, rank.session.intern("block"), 0, 5)
        rank.steps(40, **WORK)
        rank.session.recorder.record_span(Kind.MODULE, rank.session.intern("block"), 0, 5)
        rank.session.recorder.record_span(Kind.SECTION, rank.session.intern("log"), 0, 5)
        rank.session.recorder.record_span(
            Kind.COLLECTIVE, rank.session.intern("allreduce group=0"), 0, 5, 0, 64, 0
        )
        rank.steps(1, **WORK)
    value = as_json(report_on(run, ranks))

    assert SCHEMA == value["schema"] == 4
    assert set(value) == {
        "schema", "run", "steps", "ranks", "heat", "history", "modules", "sections", "device_sections", "collectives",
        "slow_links", "captures", "goodput", "gpus", "links", "utilization", "verdicts", "lost_time",
         "quality", "trainings",
    }  # fmt: skip
    assert {"id", "world_size", "nodes", "started", "ended"} <= set(value["run"])
    assert {"count", "p50_s", "p95_s", "p99_s", "max_s"} <= set(value["steps"])
    assert {"total_s", "alike", "long", "sampled_lack_of_cpu"} <= set(value["steps"])
    assert {"rank", "host", "own_s", "phases", "typical", "not_measured"} <= set(value["ranks"][0])
    assert set(value["ranks"][0]["phases"]["forward"]) == {"typical_s", "p50_s", "mean_s", "share"}
    assert set(value["ranks"][0]["typical"]) == {"s", "own_s", "work_s", "parts", "lack_of_cpu"}
    assert "arrived_last" in value["ranks"][0]
    assert set(value["verdicts"][0]) == {*Verdict.__struct_fields__}
    assert {"records", "lost", "coverage", "overhead_share", "notes"} <= set(value["quality"])
    assert {"name", "calls", "own_s", "by_rank"} <= set(value["modules"][0])
    assert {"operation", "group", "count", "bytes"} <= set(value["collectives"][0])
    assert (value["collectives"][0]["bytes"], value["collectives"][0]["group"]) == (128, "0")
    assert value["sections"][0]["name"] == "log"


def test_step_times_own_times_and_shares_equal_the_recorded_ones(run: RunDirectory) -> None:
    value = report_on(run, [Rank(run, 0, 1)])
    assert value["steps"]["count"] == 0

    rank = Rank(run, 0, 1, identity={"attempt": 1})
    rank.steps(50, **WORK)
    value = report_on(run, [rank])
    phases = value["ranks"][0]["phases"]

    assert value["steps"]["count"] == 50
    assert value["steps"]["max_s"] == pytest.approx(0.014)
    assert value["steps"]["p50_s"] == pytest.approx(0.014, rel=0.012)
    assert value["ranks"][0]["own_s"]["max_s"] == pytest.approx(0.012)
    assert sum(part["share"] for part in phases.values()) == pytest.approx(1)
    assert phases["backward"]["share"] == pytest.approx(6 / 14)
    # Nothing was recomputed, so there is no row of zeros.
    assert "recompute" not in phases
    assert value["ranks"][0]["memory"]["max_bytes"] == 123_000_000


@pytest.mark.parametrize(
    ("parts", "kind", "phase", "word"),
    [
        ({"data": 5, "forward": 5}, "data_bound", "data", "a batch"),
        ({"forward": 5, "communication": 5}, "communication_bound", "communication", "operations"),
        ({"forward": 5, "host": 5}, "host_bound", "host", "torchlens_perf.section("),
        (
            {"forward": 19, "host": 1},
            "compute_bound",
            "forward",
            "module with the most time of its own",
        ),
    ],
)
def test_verdict_on_a_single_rank_is_its_bottleneck(
    run: RunDirectory, parts: dict[str, float], kind: str, phase: str, word: str
) -> None:
    """The verdict has the share, the time and the action."""
    rank = Rank(run, 0, 1)
    rank.steps(60, **parts)
    (verdict,) = report_on(run, [rank])["verdicts"]

    assert (verdict.kind, verdict.phase, verdict.rank) == (kind, phase, None)
    assert verdict.evidence.uses_s[kind] == pytest.approx(parts[phase] / 1e3)
    assert word in verdict.action
    assert (verdict.cost_share > 0) == (kind != "compute_bound")


def test_straggler_verdict_has_rank_phase_cost_step_and_action(run: RunDirectory) -> None:
    """The report has no other verdict. The sentence also has the host and the share."""
    ranks = [Rank(run, 0), Rank(run, 1)]
    ranks[0].steps(80, **{**WORK, "communication": 12})
    ranks[1].steps(80, **{**WORK, "backward": 16})
    (verdict,) = report_on(run, ranks)["verdicts"]

    assert (verdict.kind, verdict.rank, verdict.phase, verdict.since_step) == (
        "straggler",
        1,
        "backward",
        0,
    )
    assert verdict.cost_s_per_step == pytest.approx(0.010, rel=0.01)
    assert verdict.cost_share == pytest.approx(10 / 24, rel=0.01)
    assert verdict.confidence > 0.8
    assert (
        verdict.sentence
        == f"Rank 1 ({HOST}) is slow in the backward pass: it computes 22.0 ms per step, the other"
        " rank 12.0 ms. It costs the job 10.0 ms a step (42%), since the start. Next: compare"
        " the input sizes of the model on rank 1 with other ranks', then the clock speed and"
        " other processes of its host."
    )


def test_straggler_verdict_has_the_slow_module(run: RunDirectory) -> None:
    """The module explains most of the slow forward pass."""
    ranks = [Rank(run, 0), Rank(run, 1)]
    for rank, extra in zip(ranks, (0, 8), strict=True):
        recorder, clock, intern = rank.session.recorder, rank.clock, rank.session.intern
        for _ in range(100):  # Four of these steps form a step bin.
            recorder.begin(Kind.FORWARD, intern("forward Net"))
            for name, milliseconds in (("embed", 1), ("block", 4 + extra), ("head", 2)):
                recorder.begin(Kind.MODULE, intern(name))
                clock.advance(milliseconds * 1_000_000)
                recorder.end(Kind.MODULE, intern(name))
            recorder.end(Kind.FORWARD, intern("forward Net"))
            recorder.next_step()
    (verdict,) = report_on(run, ranks)["verdicts"]

    assert verdict.evidence.modules == ("block",)
    assert verdict.evidence.module_excess_s == pytest.approx(0.008, rel=0.01)
    assert "most of the difference is in block (+8.00 ms a step)" in verdict.sentence
    assert "Next: compare the input sizes of block on rank 1" in verdict.sentence


def test_sixty_short_steps_are_too_few_for_a_comparison(run: RunDirectory) -> None:
    """Equal ranks have steps of 1.4 ms.

    With the number of steps that the report asks for, the ranks are compared.
    """
    ranks = [Rank(run, 0), Rank(run, 1)]
    short = {part: value / 10 for part, value in WORK.items()}
    for rank in ranks:
        rank.steps(60, **short)
    text = report_on(run, ranks)["verdicts"][0].sentence

    assert text.startswith("Too few steps to compare the ranks (60): ")
    assert "they do different work" not in text
    needed = int(text.partition("run at least ")[2].split()[0])
    assert needed > 60
    again = make_run(run.path.parent / "again")
    ranks = [Rank(again, 0), Rank(again, 1)]
    for rank in ranks:
        rank.steps(needed, **short)
    assert report_on(again, ranks)["verdicts"][0].sentence.startswith(
        f"No slow rank in {needed} steps"
    )


def test_verdict_without_slow_ranks_has_the_smallest_detectable_slowdown(run: RunDirectory) -> None:
    ranks = [Rank(run, 0), Rank(run, 1)]
    for rank in ranks:
        rank.steps(80, **WORK)
    verdict = report_on(run, ranks)["verdicts"][0]

    assert verdict.kind == "none"
    assert verdict.sentence.startswith(
        "No slow rank in 80 steps. The smallest detectable slowdown is 1.74 ms per step (12% of "
    )
    assert verdict.evidence.detectable_s == pytest.approx(0.1 / 57.6)


def test_overhead_share_excludes_a_first_step_that_compiles(run: RunDirectory) -> None:
    """The overhead is 0.1 ms in steps of 14 ms, and the first step takes a minute."""
    rank = Rank(run, 0)
    rank.steps(1, host=60_000)
    for _ in range(40):
        rank.session.recorder.add_overhead(100_000)
        rank.steps(1, **WORK)
    value = report_on(run, [rank])

    assert 0.005 < value["quality"]["overhead_share"] < 0.02


@pytest.mark.parametrize(
    ("steps", "text"),
    [(0, "No step was seen."), (2, "Too few steps were recorded (2)"), (12, "Too few steps")],
)
def test_few_or_no_steps_are_explained_without_zeros(
    run: RunDirectory, steps: int, text: str
) -> None:
    """The report has a sentence and an action."""
    ranks = [Rank(run, 0), Rank(run, 1)]
    for rank in ranks:
        rank.steps(steps, **WORK)
    value = report_on(run, ranks)

    assert value["verdicts"][0].sentence.startswith(text)
    assert "Next: " in value["verdicts"][0].sentence
    assert text in render_full(value, "/runs/1", columns=100, color=False)
    if steps <= 2:
        assert value["steps"]["p50_s"] is None
        assert value["ranks"][0]["own_s"]["p50_s"] is None


def test_steps_of_inference_are_called_forward_passes(run: RunDirectory) -> None:
    """There is no optimizer."""
    rank = Rank(run, 0, 1)
    for _ in range(20):
        rank.clock.advance(1_000_000)
        rank.session.recorder.next_step(int(Flag.INFERENCE), 0, 1)
    value = report_on(run, [rank])

    assert value["steps"]["inference"]
    assert "20 forward passes" in render_full(value, "/runs/1", columns=100, color=False)


def test_run_that_gets_slower_has_the_change_of_its_step_time(run: RunDirectory) -> None:
    """The change is that from the first to the last third of the run."""
    rank = Rank(run, 0, 1)
    for i in range(120):
        rank.steps(1, forward=10 + i / 20)
    value = report_on(run, [rank])

    assert value["steps"]["trend"]["change"] == pytest.approx(0.33, abs=0.05)
    assert "trend slower 3" in render_full(value, "/runs/1", columns=100, color=False)


def test_report_has_ranks_of_several_nodes_with_their_hosts(run: RunDirectory) -> None:
    states = []
    for index, host in enumerate(("node-a", "node-b")):
        rank = Rank(run, index, identity={"host": host, "local_world_size": 1})
        rank.steps(40, **{**WORK, "data": 1 + 5 * index})
        rank.close()
        sidecar = Sidecar(run, host, None, lambda run, asked: None)
        sidecar.read_rings()
        sidecar.count_records()
        states.append(sidecar.state)
        sidecar.close()
    value = checked(build_report(run.run_id, states))
    text = render_full(value, "/runs/1", columns=130, color=False)

    assert value["run"]["nodes"] == ["node-a", "node-b"]
    assert [row.kind for row in value["verdicts"]].count("not_compared") == 1
    assert "2 ranks on 2 nodes" in text
    assert re.search(r"^ +1  node-b ", text, re.MULTILINE)


def test_report_is_about_the_newest_attempt_of_each_rank(run: RunDirectory) -> None:
    """An elastic restart begins another attempt."""
    first, second = Rank(run, 0, 1), Rank(run, 0, 1, identity={"attempt": 3})
    first.steps(70, **WORK)
    second.steps(20, **WORK)
    value = report_on(run, [first, second])

    assert (value["run"]["attempt"], value["steps"]["count"]) == (3, 20)


def test_ranks_that_left_an_elastic_job_are_not_in_the_report(run: RunDirectory) -> None:
    """torchrun does not increment the attempt when an agent leaves."""
    identities = [
        identity_of(run, 0, 2),
        identity_of(run, 1, 2, pid=11),
        identity_of(run, 0, 1, pid=12),
    ]
    processes = [
        ProcessState(identity, Anchor(number, number, 0), RankStatistics())
        for number, identity in enumerate(identities)
    ]
    value = build_report(
        run.run_id, [NodeState(HOST, {each.identity.key: each for each in processes})]
    )

    assert (value["run"]["world_size"], [rank["rank"] for rank in value["ranks"]]) == (1, [0])


class TestTerminal:
    def value(self, run: RunDirectory) -> dict[str, Any]:
        ranks = [Rank(run, 0), Rank(run, 1)]
        ranks[0].steps(60, **{**WORK, "communication": 12})
        ranks[1].steps(60, **{**WORK, "backward": 16})
        return report_on(run, ranks)

    def test_report_in_a_file_or_pipe_is_plain_text(self, run: RunDirectory) -> None:
        """There are no escape sequences, no overlong lines, and no padding."""
        file = io.StringIO()
        print_report(self.value(run), file, "/runs/1", whole=True)
        text = file.getvalue()

        assert "\x1b" not in text
        assert max(len(line) for line in text.splitlines() if "export " not in line) <= 118
        assert not any(line.endswith(" ") for line in text.splitlines())
        assert text.endswith("  directory   /runs/1\n")
        assert "SLOW RANK rank 1 (node-a) backward since step 0" in " ".join(text.split())

    def test_report_in_a_terminal_has_colours(self, run: RunDirectory) -> None:
        text = render_full(self.value(run), "/runs/1", columns=90, color=True)

        assert "\x1b[1;31m" in text

    def test_bars_of_all_ranks_have_one_scale(self, run: RunDirectory) -> None:
        """The slow rank is compared with another one."""
        lines = (
            render_full(self.value(run), "/runs/1", columns=86, color=False)
            .partition("Extra compute")[0]
            .splitlines()
        )
        bars = {
            line[2:13].strip(): line[14:]
            for line in lines
            if line.startswith(("  rank 1  ", "  rank 0  "))
        }

        # Of 24 ms, the parts are 1, 4, 16, 2 and 1 ms, and 1, 4, 6, 12 and 1 ms.
        assert bars == {
            "rank 1": "=" * 3 + "█" * 12 + "▓" * 48 + "░" * 6 + "▚" * 3,
            "rank 0": "=" * 3 + "█" * 12 + "▓" * 18 + "░" * 36 + "▚" * 3,
        }

    def test_slow_rank_is_the_first_row_of_the_table(self, run: RunDirectory) -> None:
        value = self.value(run)
        value["ranks"][1]["arrived_last"] = {"count": 30, "joined": 40, "share": 0.75}
        lines = render_full(checked(value), "/runs/1", columns=130, color=False).splitlines()
        (header,) = [place for place, line in enumerate(lines) if line.startswith("  rank  step")]

        assert value["ranks"][0]["arrived_last"] is None
        assert "last to arrive" in lines[header]
        assert (lines[header + 1].split()[0], "75%" in lines[header + 1]) == ("1", True)
        assert lines[header + 2].split()[0] == "0"

    @pytest.mark.parametrize("columns", [118, 90, 70, 50])
    def test_table_omits_columns_rather_than_breaking_cells_across_lines(
        self, run: RunDirectory, columns: int
    ) -> None:
        """Every quantity stays in its rank's line."""
        wide, narrow = (
            text.partition("Typical step of each rank, ms\n")[2].splitlines()[:3]
            for text in (
                render_full(self.value(run), "/r", columns=width, color=False)
                for width in (200, columns)
            )
        )

        assert max(map(len, narrow)) <= columns
        for row, everything in zip(narrow, wide, strict=True):
            cells = re.split(r"\s{2,}", row.strip())
            assert len(cells) == len(re.split(r"\s{2,}", narrow[0].strip()))
            assert set(cells) <= set(re.split(r"\s{2,}", everything.strip()))
        assert narrow[0].split()[:1] == ["rank"]
        assert "compute" in narrow[0]

    def test_names_cannot_control_the_terminal(self, run: RunDirectory) -> None:
        """Escape sequences, newlines and markup in names are printed as text."""
        rank = Rank(run, 0, 1, identity={"program": "\x1b]0;owned\x07[bold red]train.py"})
        rank.steps(10, **WORK)
        for name in ("\x1b[2Jgone", "two\nlines", "[link=http://x]click[/link]", "right\u202eleft"):
            rank.session.recorder.record_span(Kind.SECTION, rank.session.intern(name), 0, 5)
        rank.steps(1, **WORK)
        text = render_full(report_on(run, [rank]), "/runs/\x1b[31m1", columns=100, color=False)

        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "?[2Jgone" in text
        assert "two?lines" in text
        assert "[link=http://x]click[/link]" in text
        assert "[bold red]train.py" in text

    def test_table_of_many_ranks_shows_the_slowest_and_a_range(self, run: RunDirectory) -> None:
        """A line has the range of the other ranks."""
        ranks = [Rank(run, rank, 20, ring_records=1024) for rank in range(20)]
        for rank in ranks:
            rank.steps(10, **{**WORK, "forward": 4 + (rank.identity.rank == 13)})
        text = render_full(report_on(run, ranks), "/runs/1", columns=130, color=False)

        assert "  16 ranks not shown: compute 12.0 ms" in text
        assert text.partition("  rank  ")[2].splitlines()[1].split()[0] == "13"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (5e-9, "5 ns"),
        (1.5e-6, "1.50 us"),
        (0.0123, "12.3 ms"),
        (0.999, "999 ms"),
        (75, "75.0 s"),
    ],
)
def test_durations_have_three_digits_and_a_suitable_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_small_shares_have_a_decimal() -> None:
    assert (format_percent(0.421), format_percent(0.0213)) == ("42%", "2.1%")


def test_each_kind_of_lost_data_has_a_note_with_its_number(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(10, **WORK)
    rank.close()
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    (process,) = sidecar.state.processes.values()
    sidecar.close()
    process.statistics.lost, process.unbalanced, process.too_deep = 5, 6, 7
    process.names_lost, process.internal_errors = 8, 9
    state = NodeState(
        HOST, {"key": process}, dropped_segments=4, notes=["OTLP: 3 of 9 spans were not delivered"]
    )
    notes = "\n".join(build_report("run", [state])["quality"]["notes"])

    for text in (
        "5 records were",
        "6 spans have no recorded end",
        "7 spans nested",
        "too many distinct names",
        "9 internal errors",
    ):
        assert f"rank 0: {text}" in notes
    assert "4 old segments" in notes
    assert "3 of 9 spans were not delivered" in notes


def test_report_from_a_saved_state_equals_the_report_of_the_sidecar(run: RunDirectory) -> None:
    from torchlens_perf.verdicts import node_state

    rank = Rank(run, 0, 1)
    rank.steps(64, **WORK)
    before = report_on(run, [rank])
    after = build_report(run.run_id, node_state.load_all(run))

    assert after == before
