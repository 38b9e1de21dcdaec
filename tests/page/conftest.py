"""Runs for page tests: simulated ones with a planted slow rank, and small ones written directly."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.simulations import simulation
from torchlens_perf.commands.simulate import record_simulation
from torchlens_perf.page.contents import PageContents
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.simulate.rings import SimulatedDevice
from torchlens_perf.simulate.simulation import Topology

STEPS, SLOW_RANK, SINCE_STEP = 150, 5, 40
FAULT = f"constant:rank={SLOW_RANK},share=0.3,phase=forward,since={SINCE_STEP}"


def recorded(
    folder: Path,
    *faults: str,
    steps: int = STEPS,
    device: SimulatedDevice | None = None,
    **more: Any,
) -> RunDirectory:
    """Simulate a run and write its directory like a sidecar."""
    # A run can have only one sidecar, and other processes simulate at the same time.
    run = RunDirectory(folder / f"run-{uuid.uuid4().hex[:12]}")
    run.create()
    record_simulation(simulation(*faults, **more), steps, run, "simulated", device)
    return run


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Return a run of eight ranks in a mesh of two dimensions. SLOW_RANK is slow."""
    return recorded(
        tmp_path_factory.mktemp("simulated"), FAULT, topology=Topology(4, 2, node_size=4)
    )


@pytest.fixture(scope="session")
def shown(simulated: RunDirectory) -> PageContents:
    return gather_contents(simulated)


@pytest.fixture(scope="session")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Return a run of four ranks that work on devices. One of the ranks is slow on its device."""
    fault = "constant:rank=2,share=0.3,phase=backward"
    return recorded(
        tmp_path_factory.mktemp("device"),
        fault,
        steps=96,
        device=SimulatedDevice(),
        topology=Topology(4, node_size=4),
    )
