"""A simulated run that continues as long as a test needs, with its ring files and a sidecar.

The sidecar writes only when the test tells it to.
"""

from __future__ import annotations

import time
from pathlib import Path

from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.simulate.faults import parse_fault
from torchlens_perf.simulate.rings import SimulatedRank, Timeline
from torchlens_perf.simulate.simulation import BLOCK, Simulation, Topology


class LiveSimulation:
    """A simulated run that is live inside the context and ends with the context."""

    def __init__(
        self,
        path: Path,
        ranks: int,
        *faults: str,
        node_size: int = 8,
        stages: int = 1,
        total_steps: int = 0,
        seconds_ago: int = 600,
    ) -> None:
        """Create the run.

        `stages` is the number of pipeline stages, with data parallelism in each stage.

        `total_steps` is the run's configured number of steps, and `seconds_ago` is the age of its
        start.
        """
        self.name = path.name
        self.run = RunDirectory(path)
        self.run.create()
        topology = Topology(ranks // stages, pp=stages, node_size=node_size)
        self._simulation = Simulation(topology, faults=[parse_fault(each) for each in faults])
        self._blocks = 0
        host = topology.host_name(0)
        begin = Anchor(10**12, time.time_ns() - seconds_ago * 10**9, 0)
        self.ranks = [
            SimulatedRank(
                self.run, host, topology, rank, begin, "simulated", total_steps=total_steps
            )
            for rank in range(ranks)
        ]
        self.sidecar = Sidecar(self.run, host, None, lambda run, asked: None)

    @property
    def steps(self) -> int:
        """Return the number of steps that each rank has made."""
        return BLOCK * self._blocks

    def add_blocks(self, blocks: int = 1) -> None:
        """Add blocks of 32 steps, then judge and write them."""
        for _ in range(blocks):
            timeline = Timeline.from_steps(self._simulation.block(self._blocks))
            self._blocks += 1
            for rank in self.ranks:
                rank.write_steps(timeline)
            self.sidecar.read_rings()
            self.sidecar.count_records()
            self.sidecar.judge_ranks(time.monotonic())
        self.sidecar.save_state()

    def end_run(self) -> None:
        """Make all ranks leave their watch, which ends the run. A second call has no effect."""
        if not self.ranks:
            return
        for rank in self.ranks:
            rank.close()
        self.ranks = []
        self.sidecar.read_rings()
        self.sidecar.count_records()
        self.sidecar.judge_ranks(time.monotonic(), final=True)
        self.sidecar.save_records()
        self.sidecar.close()

    def __enter__(self) -> LiveSimulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.end_run()
