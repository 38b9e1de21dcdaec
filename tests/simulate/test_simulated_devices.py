"""Simulated ranks on devices, which are judged by the device's clock.

Device times are reported late, or are missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simulate.test_simulated_runs import verdicts
from tests.support.long import long
from tests.support.page_matrices import Steps
from tests.support.ranks import make_run
from tests.support.reports import checked
from tests.support.simulations import judge_run, simulation
from torchlens_perf.commands.simulate import record_simulation
from torchlens_perf.errors import ConfigError
from torchlens_perf.page.document.html import build_document
from torchlens_perf.page.gather import device_grid
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.sidecar.replay import replay
from torchlens_perf.simulate.faults import parse_fault
from torchlens_perf.simulate.launch_bound import LaunchBoundJob
from torchlens_perf.simulate.rings import SimulatedDevice
from torchlens_perf.simulate.simulation import Simulation, Topology
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE, HOST

STEPS = 160
FAULTS = [
    "constant:rank=3,share=0.1,phase=forward,since=64", "constant:rank=2,share=0.1,phase=data",
    "constant:rank=1,share=0.1,phase=backward", "constant:rank=6,share=0.1,phase=optimizer",
    "constant:rank=4,share=0.1,phase=host", "moving:ranks=1+4,share=0.1,every=70", "",
]  # fmt: skip


def recorded(folder: Path, fault: str, device: SimulatedDevice | None) -> Findings:
    """Record a run with the given fault and device, and return the sidecar's findings."""
    run = make_run(folder)
    made = simulation(*([fault] if fault else []), noise=0.05)
    record_simulation(made, STEPS, run, "note", device)
    (state,) = node_state.load_all(run)
    by = {process.judged_by for process in state.processes.values()}
    assert by == {HOST if device is None else DEVICE}
    return state.findings


@pytest.mark.parametrize("fault", [FAULTS[0], *long(*FAULTS[1:5]), *FAULTS[5:]])
def test_device_run_has_the_same_verdicts_as_a_cpu_run(fault: str, tmp_path: Path) -> None:
    """Faults on a device are not visible in the host's times."""
    found = recorded(tmp_path, fault, SimulatedDevice())
    expected = judge_run(simulation(*([fault] if fault else []), noise=0.05), STEPS)

    assert verdicts(found) == verdicts(expected)
    assert bool(found.episodes) == bool(fault)


@pytest.mark.parametrize("late_steps", [0, 7, 64])
def test_slow_rank_is_reported_with_late_or_missing_device_times(
    late_steps: int,
    tmp_path: Path,
) -> None:
    """The device is up to 64 steps behind.

    Times of one step in twenty are missing, a different one on each rank.
    """
    found = recorded(tmp_path, FAULTS[1], SimulatedDevice(late_steps, missing=0.05))

    assert [(each.rank, each.phase) for each in found.episodes] == [(2, "data")]
    assert found.compared == 8


def test_report_without_device_times_says_that_ranks_were_not_compared(tmp_path: Path) -> None:
    """The report has no slow rank, and does not claim that no rank is slow."""
    run = make_run(tmp_path)
    record_simulation(
        simulation(FAULTS[0], noise=0.05), STEPS, run, "note", SimulatedDevice(missing=1.0)
    )
    report = build_report(run.run_id, node_state.load_all(run))
    kinds = [verdict.kind for verdict in report["verdicts"]]

    assert "straggler" not in kinds
    assert kinds[0] == "not_compared"


def test_replay_has_the_same_verdicts_as_the_live_run(tmp_path: Path) -> None:
    """Findings of a replay are judged by the device's clock in the stored records."""
    run = make_run(tmp_path)
    record_simulation(
        simulation(FAULTS[0], noise=0.05), STEPS, run, "note", SimulatedDevice(3, 0.05)
    )
    (live,) = node_state.load_all(run)
    (path,) = run.nodes.glob("*.json")
    # Delete the live state, so that the second state is the replay's.
    path.unlink()
    replay(run, None)
    (again,) = node_state.load_all(run)

    assert verdicts(again.findings) == verdicts(live.findings)
    assert {process.judged_by for process in again.processes.values()} == {DEVICE}
    work_ns = [
        {key: process.statistics.device.work.sum_ns for key, process in each.processes.items()}
        for each in (live, again)
    ]
    assert work_ns[0] == work_ns[1]


LAUNCH_BOUND = SimulatedDevice(launch_bound=True)


def launch_bound(folder: Path, *faults: str) -> tuple[Findings, dict[str, Any], RunDirectory]:
    """Record eight ranks whose hosts run ahead of their devices.

    Return the findings, the report and the run.
    """
    run = make_run(folder)
    made = Simulation(Topology(8), faults=[parse_fault(each) for each in faults], noise=0.05)
    record_simulation(made, STEPS, run, "note", LAUNCH_BOUND)
    states = node_state.load_all(run)
    return states[0].findings, checked(build_report(run.run_id, states)), run


def test_no_rank_is_reported_when_hosts_run_ahead_of_their_devices(tmp_path: Path) -> None:
    """All ranks but the last wait in communication for more than half of the step.

    The bottleneck is the launch of the kernels nevertheless.
    """
    found, report, _ = launch_bound(tmp_path)
    bottleneck = report["verdicts"][-1]

    assert found.episodes == ()
    assert bottleneck.kind == "host_bound"
    assert 0.4 < bottleneck.evidence.idle_s / report["steps"]["mean_s"] < 1
    assert "% of a step of 201 ms, the slowest rank's GPU is idle." in bottleneck.sentence
    assert report["steps"]["own_time"]["hidden_share"] > 0.5
    # Most ranks are idle by device time, so the report has no heat map.
    assert report["heat"] is None


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "data", "host"])
def test_cost_of_a_slow_host_is_its_excess(phase: str, tmp_path: Path) -> None:
    """The excess is 20 ms of 200.

    Other hosts begin to wait because their devices' queues are full, which is not work.
    """
    found, _, _ = launch_bound(tmp_path, f"constant:rank=2,share=0.1,phase={phase},since=32")
    (episode,) = found.episodes

    assert (episode.rank, episode.phase, episode.by_host) == (2, phase, True)
    assert episode.since_step == pytest.approx(32, abs=8)
    assert episode.cost_ns == pytest.approx(20e6, rel=0.25)


@pytest.mark.parametrize("each_step", [True, False])
def test_page_compares_hosts_for_each_step_of_a_short_run(
    each_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If device times were compared, rank 2 would have ten times the work of other ranks.

    With more steps than the limit, the page has no excess of single steps.
    """
    if not each_step:
        # Together, the 8 ranks have one step more than this limit.
        monkeypatch.setattr(device_grid, "MAX_STEPS", 8 * STEPS - 1)
    _, _, run = launch_bound(tmp_path, "constant:rank=2,share=0.1,phase=forward,since=32")
    page = gather_contents(run)
    assert page["steps"] is not None
    excess = Steps(page["steps"]).excess()
    drawn = build_document(page)

    if each_step:
        assert np.nanmean(excess[2, 40:]) == pytest.approx(0.1, abs=0.02)
        assert np.nanmax(np.abs(np.nanmean(excess[[0, 1, 3, 4, 5, 6, 7]], axis=1))) < 0.03
    else:
        assert not np.isfinite(excess).any()
    assert "The devices wait for other ranks, so device times cannot show" in drawn


def test_launch_bound_job_with_tensor_parallelism_is_an_error() -> None:
    with pytest.raises(ConfigError, match="can only be data parallel"):
        LaunchBoundJob(Topology(dp=2, tp=2))
