"""Tests that all screens and exporters show the same numbers, for 50 simulated and ten recorded
runs.

Cost, share, first and last step of a finding are equal in its sentence, its row, its alert and the
data for exporters. A step since which something is so is always that of a verdict.

The parts in a table add up to its total.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, cast

import pytest

from tests.golden.test_recorded_runs import RUNS as RECORDED_RUNS
from tests.golden.test_recorded_runs import replayed
from tests.golden.test_simulated_verdicts import LAUNCH_BOUND, MESH
from tests.report.test_order import heads, shown_in_order
from tests.results.test_logged_verdicts import Board
from tests.support.in_memory import InMemoryExporter
from tests.support.long import long
from tests.support.reports import checked
from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.commands.simulate import record_simulation
from torchlens_perf.diagnosis.goodput import CLASSES
from torchlens_perf.diagnosis.lost_time import SLOW_RANK as SLOW_CLASS
from torchlens_perf.diagnosis.lost_time import join_classes
from torchlens_perf.exporters import otlp_environment, semantics
from torchlens_perf.exporters.otlp_metrics import NodeMetrics
from torchlens_perf.exporters.series import ArrayMeter
from torchlens_perf.page.contents import PageContents
from torchlens_perf.page.document.html import build_document
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.page.notebook import results_as_json
from torchlens_perf.page.sections.overview import build_key_figures
from torchlens_perf.page.sections.verdicts import build_verdicts_section as cards
from torchlens_perf.report import report_json
from torchlens_perf.report.build import build_report
from torchlens_perf.report.run_report import load_report
from torchlens_perf.results.logged_verdicts import (
    VERDICT,
    VerdictLoggers,
    check_log_arguments,
)
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.verdicts import ENDED
from torchlens_perf.serve.run_list import read_lines
from torchlens_perf.simulate.faults import parse_fault
from torchlens_perf.simulate.rings import SimulatedDevice
from torchlens_perf.simulate.simulation import Simulation, Topology
from torchlens_perf.store.run_folders import find_runs
from torchlens_perf.top.overview import all_finding_lines
from torchlens_perf.top.reading import View
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.view.headline import Headline, build_headlines, choose_headline, list_current
from torchlens_perf.view.tables import build_tables
from torchlens_perf.view.terminal import render_full, render_short

STEPS = 160
FAULTS: dict[str, tuple[Topology, SimulatedDevice | None, tuple[str, ...]]] = {
    "nothing": (MESH, None, ()),
    "constant": (MESH, None, ("constant:rank=3,share=0.25,phase=forward,since=40",)),
    "until": (MESH, None, ("constant:rank=3,share=0.25,phase=backward,since=30,until=100",)),
    "data": (MESH, None, ("constant:rank=5,share=0.3,phase=data",)),
    "several": (
        MESH,
        None,
        ("constant:rank=3,share=0.2", "constant:rank=6,share=0.25,phase=optimizer,since=60"),
    ),
    "moving": (MESH, None, ("moving:ranks=1+4,share=0.25,every=70",)),
    "node": (MESH, None, ("node:node=1,share=0.15",)),
    "stalls": (MESH, None, ("stalls:rank=3,share=3,every=40",)),
    "device": (MESH, SimulatedDevice(), ("constant:rank=3,share=0.2,phase=forward,since=40",)),
    "slow host": (Topology(8), LAUNCH_BOUND, ("constant:rank=2,share=0.2,phase=forward,since=40",)),
}
SINCE = re.compile(r"[Ss]ince step (\d+)")


@pytest.mark.parametrize("seed", [0, *long(1, 2, 3, 4)])
@pytest.mark.parametrize("name", FAULTS)
def test_numbers_of_simulated_runs_are_equal_on_all_screens(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology, device, faults = FAULTS[name]
    run, exporter = (
        RunDirectory(tmp_path / f"agree-{name.replace(' ', '-')}-{seed}"),
        InMemoryExporter(),
    )
    run.create()
    monkeypatch.setattr(otlp_environment, "create_exporter_from_environment", lambda *_: exporter)
    simulation = Simulation(
        topology, seed=seed, faults=[parse_fault(each) for each in faults], noise=0.05
    )
    record_simulation(simulation, STEPS, run, run.run_id, device)
    assert exporter.assessment is not None
    assert exporter.assessment.goodput_s
    critical_path_agrees(run, exporter)

    report = checked(build_report(run.run_id, node_state.load_all(run)))
    check_all_surfaces_agree(report, exporter, tmp_path)
    each_change_has_one_step(report, gather_contents(run))


@pytest.mark.parametrize("name", RECORDED_RUNS)
def test_numbers_of_recorded_runs_are_equal_on_all_screens(name: str, tmp_path: Path) -> None:
    report, exporter = replayed(name, tmp_path)
    check_all_surfaces_agree(report, exporter, tmp_path)
    each_change_has_one_step(report)


def check_all_surfaces_agree(
    report: dict[str, Any], exporter: InMemoryExporter, folder: Path
) -> None:
    """Check that all screens and exporters agree. folder: the parent of the run directory."""
    for row in report["verdicts"]:
        sentence_has_the_figures_of_its_row(row)
    parts_add_up(report)
    goodput_has_the_figures_of_the_rows(report, exporter)
    every_surface_has_the_verdicts(report)
    check_alerts_have_the_figures_of_the_rows(report, exporter)
    loggers_have_the_sentences_of_the_rows(report, exporter)
    the_list_of_runs_has_the_current_verdicts(report, folder)


def sentence_has_the_figures_of_its_row(row: dict[str, Any]) -> None:
    cost, share = format_duration(row.cost_s_per_step or 0), format_percent(row.cost_share)
    if row.kind.startswith("straggler"):
        since, until = row.since_step, row.held.until_step
        start = f"step {since}" if since else "the start"
        when = f", since {start}" if until is None else f"from {start} to step {until - 1}"
        assert since == row.held.since_step, row
        assert when in row.sentence, row
        assert f"the job {cost} a step ({share})" in row.sentence, row
        assert re.search(rf"\b{row.rank}\b", row.sentence), row
    if (
        row.kind in ("data_bound", "communication_bound", "host_bound", "lack_of_cpu")
        and row.cost_share
    ):
        assert f"{share} ({cost})" in row.sentence, row


def goodput_has_the_figures_of_the_rows(report: dict[str, Any], exporter: InMemoryExporter) -> None:
    """Check that classes add up, and that the slow ranks' loss is the verdicts', also over OTLP."""
    found = {
        name: each.seconds
        for name, each in report["goodput"].classes.items()
        if each.seconds is not None
    }
    assert sum(found.values()) == pytest.approx(report["goodput"].wall_s)
    rows = [row for row in report["verdicts"] if row.kind.startswith("straggler")]
    of_costs: dict[object, float] = {}
    for place, row in enumerate(rows):
        too = getattr(row.evidence, "slow_too", ())
        # Verdicts that share one cost have one loss.
        shared = frozenset({*row.evidence.ranks, *too}) if too else place
        of_costs[shared] = max(of_costs.get(shared, 0.0), row.lost_s or 0.0)
    assert found["straggler"] == pytest.approx(sum(of_costs.values()), abs=1e-9)
    table = next(each for each in build_tables(cast("Any", report)) if each.key == "goodput")
    shown = dict(zip(table.columns[0].values, table.columns[1].values, strict=True))
    assert {CLASSES[name]: value for name, value in found.items() if value} == {
        name: value for name, value in shown.items() if isinstance(value, float)
    }
    if exporter.assessment is not None and exporter.assessment.goodput_s:
        assert exporter.assessment.goodput_s == pytest.approx(found)


def lost_time_has_the_figures_of_the_rows(report: dict[str, Any]) -> None:
    """Check that slow ranks have one cost and one share, and that all classes add up."""
    lost = report["lost_time"]
    if lost is None:
        return
    assert sum(each.share for each in lost.classes) == pytest.approx(1)
    slow = {tuple(each.ranks): each for each in lost.classes if each.name == SLOW_CLASS}
    gains = {each.change: each for each in lost.changes}
    now = [row for row in report["verdicts"] if row.kind == "straggler"]
    of_rows = {
        tuple(sorted({*row.evidence.ranks, *row.evidence.slow_too})): row
        for row in now
        if row.cost_s_per_step
    }
    assert slow.keys() == of_rows.keys()
    for ranks, row in of_rows.items():
        cost_s, share = row.cost_s_per_step, row.cost_share
        gain = gains.get(f"rank={format_ranges(ranks)}@median")
        assert gain is None or gain.gain_s == cost_s
        # Verdicts that share a cost compare it with steps of their own time.
        if not row.evidence.slow_too and slow[ranks].s_per_step == pytest.approx(cost_s):
            assert gain is None or gain.share == share
            assert slow[ranks].share == pytest.approx(share)


def critical_path_agrees(run: RunDirectory, exporter: InMemoryExporter) -> None:
    """Check that exporters get the classes of the report, up to the rows that both look at."""
    assert exporter.assessment is not None
    lost = load_report(run)["lost_time"]
    found = exporter.assessment.critical_path_s
    if lost is not None:
        wanted = join_classes(lost.classes)
        zeros = dict.fromkeys(wanted | found, 0.0)
        assert zeros | found == pytest.approx(zeros | wanted, rel=0.02, abs=0.005 * lost.step_s)


def parts_add_up(report: dict[str, Any]) -> None:
    steps = report["steps"]
    if steps["alike"]:
        others = [*steps["long"], *steps["short"]]
        assert (
            steps["alike"] + sum(each["count"] for each in others)
            == steps["count"] - steps["warm_up"]
        )
        whole_s = steps["alike"] * steps["alike_mean_s"] + sum(
            each["count"] * each["mean_s"] for each in others
        )
        # By devices, the typical step leaves out more of what varies: their waits for hosts.
        within = 0.03 if steps["by"] == "device" else 0.02
        assert whole_s == pytest.approx(steps["total_s"], rel=within)
    for rank in report["ranks"]:
        typical = rank["typical"]
        assert sum(typical["parts"].values()) == pytest.approx(typical["s"], rel=1e-6)
        assert sum(each["share"] for each in rank["phases"].values()) == pytest.approx(
            1.0, rel=1e-6
        )
    for row in report["verdicts"]:
        if hasattr(row.evidence, "uses_s"):
            parts_s = sum(row.evidence.uses_s.values())
            tool_s = max(rank["typical"]["parts"].get("tool", 0.0) for rank in report["ranks"])
            assert row.evidence.typical_step_s - tool_s <= parts_s * (1 + 1e-6)
            assert parts_s <= row.evidence.typical_step_s * (1 + 1e-6)


def every_surface_has_the_verdicts(report: dict[str, Any]) -> None:
    assert shown_in_order(
        render_full(report, "x", columns=400, color=False), ends_of_sentences(report)
    )
    in_cell = json.loads(results_as_json(report, "x", ""))
    assert [each["text"] for each in in_cell["summary"]["verdicts"]] == heads(report)
    of_summary = [
        (each["cost_s_per_step"], each["cost_share"]) for each in in_cell["summary"]["verdicts"]
    ]
    assert of_summary == [(row.cost_s_per_step, row.cost_share) for row in report["verdicts"]]
    found = build_headlines(cast("Any", report))
    in_top = " ".join(
        line.plain for line in all_finding_lines(View("x", cast("Any", report), tuple(found)), 4000)
    )
    assert shown_in_order(in_top, ends_of_sentences(report))
    assert all(each.cost in in_top for each in found if each.kind.startswith("straggler"))
    page = " ".join(cards({"report": report, "headlines": found, "tables": []}).itertext())  # type: ignore[typeddict-item]
    for headline in found:
        assert headline.sentence in page
        assert all(text in page for _, text in headline.facts)
        if headline.cost_share:
            assert format_percent(headline.cost_share) in page
    head = choose_headline(found)
    assert head is not None
    short = " ".join(render_short(report, "x", columns=400, color=False).split())
    assert head.sentence[-30:] in short
    assert (f"cost {head.cost}" in short) == bool(head.cost and not head.loss)
    tiles = build_key_figures(report, head)  # type: ignore[arg-type]
    if tiles is not None:
        figures = " ".join(" ".join(tiles.itertext()).split())
        per_second = re.search(r"([\d.]+) steps/s", short)
        assert per_second is None or f"{per_second[1]} steps per second" in figures
        shares = re.findall(
            r"(data|forward|backward|optimizer|comm wait|CPU contention) ([\d.]+%)", figures
        )
        if "█ " in short and "time" in short and head.kind != "straggler":
            assert all(f"{part} {share}" in short for part, share in shares)


def ends_of_sentences(report: dict[str, Any]) -> list[str]:
    """Return the last words of each finding.

    Only last words are compared, because a terminal shows rank and phase apart from the sentence.
    """
    return [head.sentence[-30:] for head in build_headlines(cast("Any", report))]


def check_alerts_have_the_figures_of_the_rows(
    report: dict[str, Any], exporter: InMemoryExporter
) -> None:
    now = {row.rank: row for row in report["verdicts"] if row.kind == "straggler"}
    before = {
        (row.rank, row.since_step): row
        for row in report["verdicts"]
        if row.kind in ("straggler_ended", "straggler_transient")
    }
    newest = {alert.about: alert for alert in exporter.alerts if alert.kind == "straggler"}
    for alert in newest.values():
        row = before[alert.rank, alert.since_step] if alert.change == ENDED else now.get(alert.rank)
        if row is None:
            # A later verdict on several ranks contains this rank.
            assert any(alert.rank in each.evidence.ranks for each in now.values()), alert
            continue
        assert (alert.phase, alert.since_step) == (row.phase, row.since_step), (alert, row)
        if alert.change == ENDED:
            assert (alert.cost_s_per_step, alert.cost_share) == (
                row.cost_s_per_step,
                row.cost_share,
            )
            assert alert.until_step == row.held.until_step
            assert alert.sentence == row.sentence or len(alert.ranks) > 1
    assert exporter.assessment is not None
    for group in exporter.assessment.findings.groups:
        row = now[group.lead.rank]
        assert row.cost_s_per_step == (None if group.cost_ns is None else group.cost_ns / 1e9)
        assert (group.lead.since_step, group.lead.phase) == (row.since_step, row.phase)
    gauges_have_the_figures_of_the_rows(report, exporter)


def gauges_have_the_figures_of_the_rows(report: dict[str, Any], exporter: InMemoryExporter) -> None:
    """Check the gauges of OTLP and Prometheus."""
    assert exporter.assessment is not None
    meter = ArrayMeter()
    NodeMetrics(meter, time.monotonic).on_assessment(exporter.assessment)
    points = {metric.name: list(metric.data.data_points) for metric in meter.collect()}
    rows = [row for row in report["verdicts"] if row.kind == "straggler"]
    costs_s = {
        point.attributes[semantics.RANK]: point.value
        for point in points.get(semantics.STRAGGLER_COST, ())
    }
    for row in rows:
        if row.cost_s_per_step is not None:
            assert costs_s[row.rank] == row.cost_s_per_step, row
    assert set(costs_s) == {
        rank for row in rows for rank in row.evidence.ranks if row.cost_s_per_step is not None
    }
    for row in report["verdicts"]:
        if hasattr(row.evidence, "detectable_s"):
            (point,) = points[semantics.DETECTABLE]
            assert point.value == row.evidence.detectable_s


def loggers_have_the_sentences_of_the_rows(
    report: dict[str, Any], exporter: InMemoryExporter
) -> None:
    """Check the output of `log_to()`: each alert, and the report."""
    board, loggers = Board(), VerdictLoggers()
    loggers.requests.append(check_log_arguments(board, lambda: 1))
    for alert in exporter.alerts:
        loggers.write_alert(alert)
    loggers.write_report(render_full(report, "x", columns=400, color=True))
    *told, (_, shown) = [
        (name, text.replace("\n    ", "\n").strip()) for name, text, _ in board.texts
    ]

    assert told == [(VERDICT, f"{alert.change}: {alert.sentence}") for alert in exporter.alerts]
    assert shown_in_order(shown, ends_of_sentences(report))


def the_list_of_runs_has_the_current_verdicts(report: dict[str, Any], folder: Path) -> None:
    """Check the list of `serve`. The page that `serve` shows of one run equals the report's page."""
    (line,) = read_lines(str(folder), find_runs(str(folder)), 60.0)
    loaded = load_report(RunDirectory(folder / line.name))
    lost_time_has_the_figures_of_the_rows(cast("Any", loaded))
    assert [(head.status, head.sentence, head.cost) for head in line.headlines] == [
        (head.status, head.sentence, head.cost) for head in list_current(build_headlines(loaded))
    ]
    assert (line.is_live, line.step_s) == (report["run"]["live"], report["steps"]["p50_s"])
    assert (line.ranks, line.seen) == (report["run"]["world_size"], report["run"]["ranks_seen"])


def each_change_has_one_step(report: dict[str, Any], contents: PageContents | None = None) -> None:
    """Check each "since step" of the terminal, the JSON and the page: it is that of a verdict, and
    a verdict has one."""
    headlines = build_headlines(cast("Any", report))
    steps = [
        find_first_step(row, headline)
        for row, headline in zip(report["verdicts"], headlines, strict=True)
    ]
    screens = [
        render_full(report, "x", columns=400, color=False),
        json.dumps(report_json.to_json_types(cast("Any", report))),
    ]
    slow = {
        (row.rank, row.since_step) for row in report["verdicts"] if row.kind.startswith("straggler")
    }
    if contents is not None:
        assert contents["steps"] is not None
        screens.append(re.sub(r"<script.*?</script>|<[^>]+>", " ", build_document(contents)))
        assert slow <= {(each["rank"], each["since_step"]) for each in contents["steps"]["slow"]}
    if report["heat"] is not None:
        of_ranks = {each["rank"]: each["slow"] for each in report["heat"]["ranks"]}
        assert all(since in dict(of_ranks[rank]) for rank, since in slow)
    for screen in screens:
        shown = {int(step) for step in SINCE.findall(" ".join(screen.split()))}
        assert shown <= set(steps), screen


def find_first_step(row: Verdict, headline: Headline) -> int | None:
    """Return the step since which a verdict holds: it is the same in its row, its period, its
    sentence and its headline."""
    held_since = None if row.held is None else row.held.since_step
    words = f"{row.sentence} {dict(headline.facts).get('steps')}"
    steps = {row.since_step, held_since, *map(int, SINCE.findall(words))} - {None}
    assert len(steps) <= 1, row
    return next(iter(steps), None)
