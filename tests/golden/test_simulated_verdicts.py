"""Tests of sentences, figures and alerts of simulated runs with each kind of fault, against golden
files.

The golden files change only on purpose. `UPDATE_GOLDEN=1` writes them, and the commit explains why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden.golden_text import expected_text, golden_text
from tests.support.in_memory import InMemoryExporter
from tests.support.reports import checked
from torchlens_perf.commands.simulate import record_simulation
from torchlens_perf.exporters import otlp_environment
from torchlens_perf.report.build import build_report
from torchlens_perf.run import directory
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.simulate.faults import parse_fault
from torchlens_perf.simulate.rings import SimulatedDevice
from torchlens_perf.simulate.simulation import Simulation, Topology
from torchlens_perf.verdicts import node_state

KEPT = Path(__file__).parent / "simulated"
STEPS = 224
DEVICE, LAUNCH_BOUND = SimulatedDevice(), SimulatedDevice(launch_bound=True)
MESH = Topology(dp=4, tp=2, node_size=4)
RUNS: dict[str, tuple[Topology, SimulatedDevice | None, tuple[str, ...]]] = {
    "nothing": (MESH, None, ()),
    "constant": (MESH, None, ("constant:rank=3,share=0.25,phase=forward,since=40",)),
    "until": (MESH, None, ("constant:rank=3,share=0.25,phase=backward,since=40,until=130",)),
    "data": (MESH, None, ("constant:rank=5,share=0.3,phase=data",)),
    "several": (
        MESH,
        None,
        ("constant:rank=3,share=0.2", "constant:rank=6,share=0.25,phase=optimizer,since=60"),
    ),
    "drifting": (MESH, None, ("drifting:rank=2,share=0.2,over=150",)),
    "intermittent": (MESH, None, ("intermittent:rank=2,share=0.4",)),
    "moving": (MESH, None, ("moving:ranks=1+4,share=0.2,every=100",)),
    "node": (MESH, None, ("node:node=1,share=0.15",)),
    "link": (MESH, None, ("link:rank=3,share=0.3",)),
    "stalls": (MESH, None, ("stalls:rank=3,share=3,every=40",)),
    "pauses": (MESH, None, ("pauses:share=0.5,every=50,together=yes",)),
    "variable length": (MESH, None, ("variable_length:spread=0.2,reported=yes",)),
    "stages": (
        Topology(dp=2, tp=2, pp=2, node_size=4),
        None,
        ("constant:rank=5,share=0.25,phase=forward",),
    ),
    "device": (MESH, DEVICE, ("constant:rank=3,share=0.2,phase=forward,since=40",)),
    "launch-bound": (Topology(8), LAUNCH_BOUND, ()),
    "slow host": (
        Topology(8),
        LAUNCH_BOUND,
        ("constant:rank=2,share=0.15,phase=forward,since=40",),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_report_and_alerts_of_a_simulated_run_equal_the_golden_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = _text_of_run(name, tmp_path, monkeypatch)

    assert text == expected_text(text, KEPT / f"{name.replace(' ', '_')}.txt")


def _text_of_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    topology, device, faults = RUNS[name]
    run, exporter = RunDirectory(folder / "golden"), InMemoryExporter()
    run.create()
    # Ids of alerts depend on the folder of ring files, which must have the same name in every
    # checkout.
    monkeypatch.setattr(directory, "_SHARED_MEMORY", folder)
    monkeypatch.setattr(otlp_environment, "create_exporter_from_environment", lambda *_: exporter)
    simulation = Simulation(topology, faults=[parse_fault(each) for each in faults], noise=0.05)
    record_simulation(simulation, STEPS, run, "golden", device)
    report: dict[str, Any] = checked(build_report(run.run_id, node_state.load_all(run)))
    return golden_text(" and ".join(faults) or "no fault", report, exporter.alerts)
