"""Several ranks are slow at the same time: each screen shows their joint cost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.exporters.test_exporters import Metrics
from tests.support.reports import as_json
from tests.support.simulations import simulation
from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.commands.simulate import record_simulation
from torchlens_perf.exporters import Assessment, semantics
from torchlens_perf.page.document.html import build_document
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.simulate.rings import SimulatedDevice
from torchlens_perf.simulate.simulation import Topology
from torchlens_perf.verdicts.node_state import NodeState, load_all
from torchlens_perf.view.terminal import render_full

SLOW = (0, 3)
NO_COST = re.compile(r"costs the job 0 |costs the job \d+(\.\d+)? [nu]s a step")


@pytest.fixture(scope="module", params=[None, SimulatedDevice()], ids=["host", "device"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Return a run of four ranks on one node, two of which have 20 % more work from the start."""
    run = RunDirectory(tmp_path_factory.mktemp("runs") / "run")
    run.create()
    faults = [f"constant:rank={rank},share=0.2" for rank in SLOW]
    record_simulation(
        simulation(*faults, topology=Topology(4, node_size=4)), 150, run, "simulated", request.param
    )
    return run


@pytest.fixture(scope="module")
def state(run: RunDirectory) -> NodeState:
    (state,) = load_all(run)
    return state


def test_each_of_two_slow_ranks_has_a_low_cost_and_a_high_shared_cost(state: NodeState) -> None:
    """The job waits for the other slow rank, so one alone costs almost nothing."""
    now = {each.rank: each for each in state.findings.episodes if each.until_step is None}

    assert set(now) == set(SLOW)
    assert all(each.cost_ns < 0.25 * each.excess_ns for each in now.values())
    assert len({each.shared_cost_ns for each in now.values()}) == 1
    assert all((each.shared_cost_ns or 0.0) > 0.7 * each.excess_ns for each in now.values())


def test_every_screen_shows_the_joint_cost_of_slow_ranks(
    run: RunDirectory, state: NodeState
) -> None:
    """The screens are terminal, page, JSON and gauge. The cost of one rank alone is not shown."""
    report = build_report(run.run_id, [state])
    (joint_ns,) = {each.shared_cost_ns for each in state.findings.episodes}
    assert joint_ns is not None
    rows = [row for row in as_json(report)["verdicts"] if row["kind"] == "straggler"]
    terminal = " ".join(render_full(report, str(run.path), columns=120, color=False).split())
    page = build_document(gather_contents(run))
    metrics = Metrics()
    identity = next(iter(state.processes.values())).identity
    metrics.on_assessment(Assessment(identity, state.findings, None, ()))
    costs_s = {
        point.attributes[semantics.RANK]: point.value
        for point in metrics.sent()[semantics.STRAGGLER_COST]
    }

    assert {row["rank"]: row["evidence"]["slow_too"] for row in rows} == {0: [3], 3: [0]}
    assert [row["cost_s_per_step"] for row in rows] == pytest.approx([joint_ns / 1e9] * 2)
    assert all(row["cost_share"] > 0.1 for row in rows)
    for row, other in zip(rows, (3, 0), strict=True):
        step = format_duration(row["cost_s_per_step"] / row["cost_share"])
        cost = (
            f"{format_duration(row['cost_s_per_step'])} per step ="
            f" {format_percent(row['cost_share'])} of a step of {step}"
        )
        assert f"cost {cost}, together with rank {other}" in terminal
    for text in (page,):
        assert "Together with rank 3 it costs the job" in text
        assert "Together with rank 0 it costs the job" in text
        assert not NO_COST.search(text)
    assert costs_s == pytest.approx(dict.fromkeys(SLOW, joint_ns / 1e9))


def test_joint_cost_is_one_loss_of_goodput(run: RunDirectory, state: NodeState) -> None:
    """Each rank's verdict has the joint cost, which the job has lost once."""
    report = build_report(run.run_id, [state])
    lost_s = [row.lost_s for row in report["verdicts"] if row.kind == "straggler"]
    goodput = report["goodput"]

    assert goodput is not None
    assert len(lost_s) == len(SLOW)
    assert goodput.classes["straggler"].seconds == pytest.approx(
        max(map(float, filter(None, lost_s)))
    )


def test_rank_that_was_slow_has_cost_the_job_only_while_it_was_slow(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    job = simulation("constant:rank=1,share=0.3,since=40,until=120", topology=Topology(4))
    record_simulation(job, 300, run, "simulated")
    (row,) = [
        row
        for row in build_report(run.run_id, load_all(run))["verdicts"]
        if row.kind == "straggler_ended"
    ]

    assert row.lost_s is not None
    assert row.cost_s_per_step is not None
    assert row.lost_s / row.cost_s_per_step == pytest.approx(80, abs=8)
