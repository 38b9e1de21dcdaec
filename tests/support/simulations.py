"""Simulated jobs for the tests: eight ranks on two hosts by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.steps import zero_device_columns
from torchlens_perf.run.records import OWN_PARTS, PARTS, StepTable
from torchlens_perf.simulate.faults import parse_fault
from torchlens_perf.simulate.simulation import SimulatedSteps, Simulation, Topology
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.findings import Findings


def simulation(*faults: str, topology: Topology | None = None, **settings: Any) -> Simulation:
    """Return a job with the given faults."""
    return Simulation(
        topology or Topology(4, 2, node_size=4),
        faults=[parse_fault(text) for text in faults],
        **settings,
    )


def slow_ranks(run: Simulation, step: int) -> frozenset[int]:
    """Return the ranks at fault in a step, and the members of slow groups."""
    masks = [fault.at_fault(np.array([step]), run.topology) for fault in run.faults]
    return frozenset(rank for mask in masks for rank in np.flatnonzero(mask).tolist())


def judge_run(run: Simulation, steps: int) -> Findings:
    """Return the judge's findings on the run's rows."""
    judge = StragglerDetector()
    for part in run.steps(steps):
        for population, block in part.detector_rows(1):
            judge.add_bin_batch(population, block)
    return judge.judge(final=True)


def wait_ns(steps: SimulatedSteps) -> npt.NDArray[np.float64]:
    """Return how long each step is blocked in communication, with shape [ranks, steps]."""
    found: npt.NDArray[np.float64] = steps.duration_ns - steps.parts_ns.sum(
        axis=2, dtype=np.float64
    )
    return found


def table_of(steps: SimulatedSteps, rank: int, start_ns: int = 0) -> StepTable:
    """Return the steps of one rank in the form that the sidecar reads.

    The first step begins at `start_ns`.
    """
    duration_ns = np.round(steps.duration_ns).astype(np.int64)
    count = len(steps)
    parts_ns = np.zeros((count, len(PARTS)), np.int64)
    parts_ns[:, [PARTS.index(part) for part in OWN_PARTS]] = steps.parts_ns[rank]
    parts_ns[:, PARTS.index("communication")] = duration_ns - parts_ns.sum(axis=1)
    return StepTable(
        step=np.arange(steps.first_step, steps.first_step + count),
        start_ns=start_ns + np.cumsum(duration_ns) - duration_ns,
        duration_ns=duration_ns,
        parts_ns=parts_ns,
        memory_bytes=np.zeros(count, np.int64),
        micro_steps=np.ones(count, np.int64),
        flags=steps.flags[rank],
        workload=steps.workload[rank],
        cpu_ns=np.full((count, len(PARTS)), -1),
        ready_ns=np.full_like(parts_ns, -1),
        **zero_device_columns(parts_ns, np.full_like(parts_ns, -1)),
    )
