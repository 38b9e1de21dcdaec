"""Launch-bound data-parallel ranks: a host needs longer to issue a step than its device to execute
it. Pure.

Hosts never wait for their devices within a step, as in a loop without `.item()`. A device is idle
between kernels. While a rank waits for others in the gradients' all-reduce, its host issues up to
AHEAD more steps.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from torchlens_perf.errors import require
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.simulate.simulation import SimulatedSteps, Topology

AHEAD = 4
"""A host waits for room in its queue when the device is this many steps behind."""
# Time that the device needs to execute a phase, as a share of the host's time to issue it.
_BUSY_SHARE = 0.05
PHASES = ("forward", "backward", "optimizer")


@dataclasses.dataclass(frozen=True)
class LaunchBoundTimes:
    """Times of all hosts and devices for consecutive steps, in ns since the job's first step
    began."""

    steps: SimulatedSteps
    queue_wait_ns: npt.NDArray[np.int64]
    """Time for which the host waits for room in the queue, in the forward pass: [ranks, steps]."""
    began_ns: npt.NDArray[np.int64]
    """Time at which the device begins the step: [ranks, steps]. A step ends where the next step
    begins."""
    phases_ns: npt.NDArray[np.int64]
    """Times at which the device begins and ends each phase: [ranks, steps, phases, 2]."""
    arrived_ns: npt.NDArray[np.int64]
    """Time at which the device reaches the gradients' all-reduce, at the end of backward: [ranks,
    steps]."""


def check_topology(topology: Topology) -> None:
    """Raise ConfigError for a job with tensor or pipeline parallelism."""
    require(
        topology.tp == topology.pp == 1,
        "launch-bound ranks can only be data parallel: leave out tp and pp",
    )


class LaunchBoundJob:
    """The present times of a job's hosts and devices. Call run_steps() for steps in order."""

    def __init__(self, topology: Topology) -> None:
        """Raise ConfigError as check_topology() does."""
        check_topology(topology)
        self._host_ns, self._device_ns = np.zeros((2, topology.rank_count))
        # Times at which the devices ended the newest steps.
        self._ends_ns = np.zeros((AHEAD, topology.rank_count))

    def run_steps(self, steps: SimulatedSteps) -> LaunchBoundTimes:
        """Return the times of hosts and devices for the next steps."""
        ranks, count, _ = steps.parts_ns.shape
        queue_wait_ns, began_ns, arrived_ns = np.zeros((3, ranks, count))
        phases_ns = np.zeros((ranks, count, len(PHASES), 2))
        for index in range(count):
            own = dict(zip(OWN_PARTS, steps.parts_ns[:, index].T.astype(np.float64), strict=True))
            began_ns[:, index] = self._device_ns = np.maximum(self._device_ns, self._host_ns)
            self._host_ns = self._host_ns + own["data"]
            queue_wait_ns[:, index] = np.maximum(self._ends_ns[0] - self._host_ns, 0)
            for place, phase in enumerate(PHASES):
                begin_ns = np.maximum(self._device_ns, self._host_ns)
                host_ns = own[phase] + (own["recompute"] if phase == "backward" else 0)
                self._host_ns = (
                    self._host_ns + host_ns + (queue_wait_ns[:, index] if phase == "forward" else 0)
                )
                self._device_ns = np.maximum(begin_ns + _BUSY_SHARE * host_ns, self._host_ns)
                if phase == "backward":
                    arrived_ns[:, index] = self._device_ns
                    reduced_ns = self._device_ns.max() + steps.transfer_ns[:, index].max()
                    self._device_ns = np.full(ranks, reduced_ns)
                phases_ns[:, index, place] = np.stack([begin_ns, self._device_ns], axis=1)
            self._host_ns = self._host_ns + own["host"]
            self._ends_ns = np.concatenate([self._ends_ns[1:], self._device_ns[None]])
        as_integers = (
            each.round().astype(np.int64)
            for each in (queue_wait_ns, began_ns, phases_ns, arrived_ns)
        )
        return LaunchBoundTimes(steps, *as_integers)
