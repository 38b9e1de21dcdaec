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
from torchlens_perf.diagnosis.what_if import Replay, parse_change
from torchlens_perf.exporters import Assessment, semantics
from torchlens_perf.page.document.html import build_document
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.report.build import build_report
from torchlens_perf.report.run_report import load_report
from torchlens_perf.report.usual_steps import read_usual_steps
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.simulate.rings import SimulatedDevice
from torchlens_perf.simulate.simulation import Topology
from torchlens_perf.verdicts.node_state import NodeState, load_all
from torchlens_perf.verdicts.verdict import Verdict
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
    assert len({each.shared and each.shared.cost_ns for each in now.values()}) == 1
    assert all(each.shared and each.shared.cost_ns > 0.7 * each.excess_ns for each in now.values())


def test_every_screen_shows_the_joint_cost_of_slow_ranks(
    run: RunDirectory, state: NodeState
) -> None:
    """The screens are terminal, page, JSON and gauge. The cost of one rank alone is not shown."""
    report = build_report(run.run_id, [state])
    (joint_ns,) = {each.shared.cost_ns for each in state.findings.episodes if each.shared}
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
            f" {format_percent(row['cost_share'])} of a mean step of {step}"
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


def test_gain_of_repairing_one_rank_is_that_of_its_verdict(run: RunDirectory) -> None:
    """One of two slow ranks gains less than both, and both gain no more than all."""
    report = load_report(run)
    verdicts = [row for row in report["verdicts"] if row.kind == "straggler"]
    times = read_usual_steps(run, report, load_all(run))
    assert times is not None
    replay = Replay(times, report, report["verdicts"])
    gain_s = {}
    for ranks in ("0", "3", "0,3", "all"):
        change = replay.predict([parse_change(f"rank={ranks}@median")])
        assert change is not None
        gain_s[ranks] = change.gain_s

    own_s = {str(row.rank): row.evidence.own_cost_s for row in verdicts}
    assert {ranks: gain_s[ranks] for ranks in own_s} == own_s
    assert max(gain_s["0"], gain_s["3"]) < gain_s["0,3"] <= gain_s["all"]
    assert all(
        f"Repairing only this rank gains {_amount(own)}" in row.sentence
        for row in verdicts
        for own in [row.evidence.own_cost_s]
    )


def _amount(seconds: float | None) -> str:
    return f"{format_duration(seconds)} a step" if seconds else "nothing"


def _lost_times(folder: Path, *faults: str, steps: int) -> tuple[dict[int | None, Verdict], float]:
    """Return the verdicts on slow ranks of a simulated run, and their loss in goodput in seconds."""
    run = RunDirectory(folder / "run")
    run.create()
    record_simulation(
        simulation(*faults, topology=Topology(8, node_size=8)), steps, run, "simulated"
    )
    report = build_report(run.run_id, load_all(run))
    goodput = report["goodput"]
    assert goodput is not None
    loss_s = goodput.classes["straggler"].seconds
    assert loss_s is not None
    return {row.rank: row for row in report["verdicts"] if row.kind.startswith("straggler")}, loss_s


def test_steps_with_one_slow_rank_do_not_have_the_cost_of_two(tmp_path: Path) -> None:
    """Rank 5 alone costs about 30 ms, and 60 ms together with rank 1 in half of the steps."""
    slow, loss_s = _lost_times(
        tmp_path, "constant:rank=5,share=0.15", "constant:rank=1,share=0.3,since=100", steps=200
    )
    joint_s = slow[5].cost_s_per_step
    assert joint_s is not None
    assert slow[5].since_step == 0
    assert slow[1].since_step == pytest.approx(100, abs=8)
    assert loss_s == slow[5].lost_s
    assert 100 * joint_s < loss_s < 165 * joint_s


def test_ranks_that_were_slow_together_have_cost_the_job_once(tmp_path: Path) -> None:
    slow, loss_s = _lost_times(
        tmp_path,
        "constant:rank=5,share=0.2,until=80",
        "constant:rank=1,share=0.2,until=80",
        steps=200,
    )
    assert {row.kind for row in slow.values()} == {"straggler_ended"}
    lost_s = {row.rank: row.lost_s for row in slow.values()}
    assert lost_s[5] == pytest.approx(lost_s[1], rel=0.1)
    assert loss_s == max(lost_s[5] or 0.0, lost_s[1] or 0.0)


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
