"""Accuracy of straggler verdicts in simulated runs on devices, compared with the same runs on CPUs.

    python -m benchmarks.accuracy_devices --runs 10

Each run is written to ring files and read by the ordinary sidecar. On a device, the host only
enqueues work. Device times arrive some steps late, and device times of some steps are missing. The
faults are those of `accuracy_simulated kinds`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.accuracy_simulated import FIRST_FAULTY, KINDS, Job
from benchmarks.measure import Table
from tests.support.simulations import slow_ranks
from torchlens_perf.commands.simulate import record_simulation
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.simulate.faults import parse_fault
from torchlens_perf.simulate.rings import SimulatedDevice
from torchlens_perf.simulate.simulation import Simulation
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.stragglers.findings import Findings

STEPS = FIRST_FAULTY + 256
# By column title: the way in which device times arrive. None: the work is on CPUs.
DEVICES = {
    "CPU": None,
    "device, told after 1 step": SimulatedDevice(1),
    "64 steps late": SimulatedDevice(64),
    "8 late, 10 % missing": SimulatedDevice(8, 0.1),
    "nothing told": SimulatedDevice(missing=1.0),
}


def found(run: Simulation, device: SimulatedDevice | None) -> Findings:
    """Return the sidecar's findings from the run's ring files."""
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder) / "run")
        directory.create()
        record_simulation(run, STEPS, directory, "", device)
        return node_state.load_all(directory)[0].findings


def main() -> int:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--deviation", type=float, default=0.01)
    parser.add_argument("--runs", type=int, default=10)
    asked = parser.parse_args()
    print(
        "runs in which the faulty rank is named (median number of steps until then); in brackets:"
        " another rank is named"
    )
    table = Table("fault", *DEVICES)
    for label, text in {"none": "", **KINDS}.items():
        cells = []
        for device in DEVICES.values():
            named, wrong, delays = 0, 0, []
            for seed in range(asked.runs):
                faults = [parse_fault(one) for one in text.split(" ") if one]
                run = Job(asked.ranks, asked.deviation).simulation(seed, faults)
                episodes = found(run, device).episodes
                right = [each for each in episodes if each.rank in slow_ranks(run, each.named_step)]
                named += bool(right)
                wrong += len(right) < len(episodes)
                delays += (
                    [min(each.named_step for each in right) + 1 - FIRST_FAULTY] if right else []
                )
            steps = f" ({sorted(delays)[len(delays) // 2]})" if delays else ""
            cells.append(f"{named}/{asked.runs}{steps}" + (f" [{wrong}]" if wrong else ""))
        table.row(label, *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
