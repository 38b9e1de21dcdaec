"""Simulated jobs for the tests: eight ranks on two hosts, unless told otherwise."""

from __future__ import annotations

from typing import Any

from torchlens_perf.simulated_faults import parse_fault
from torchlens_perf.simulation import Simulation, Topology
from torchlens_perf.straggler import Findings, Judge


def simulation(*faults: str, topology: Topology | None = None, **settings: Any) -> Simulation:
    """A job with these faults."""
    return Simulation(
        topology or Topology(4, 2, node_size=4), faults=[parse_fault(text) for text in faults], **settings
    )


def judged(run: Simulation, steps: int) -> Findings:
    """What the judge says of a run, from its rows."""
    judge = Judge()
    for part in run.steps(steps):
        for population, block in part.blocks(1):
            judge.add_block(population, block)
    return judge.judge(final=True)
