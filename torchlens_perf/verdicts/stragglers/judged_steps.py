"""By whose clock a rank is judged, and its steps by that clock. Pure.

A rank that computes on a device is judged by the device's clock, where that tells what the device did in each step.
Where it does not, the host's clock is all there is. The two are never mixed: it is decided once, before the first rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.device_steps import DeviceSteps
from torchlens_perf.analysis.statistics.step_bins import concatenate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.run.records import StepTable

HOST, DEVICE, UNDECIDED = "host", "device", ""
SILENT_AFTER_STEPS = 64  # a device that has reported nothing by then is not timed
_KNOWN_AFTER_STEPS = 8  # what a rank computes on: as many as the width of rows is chosen by


class JudgedSteps:
    """Of one process. Fed with its records in order."""

    def __init__(self, by: str = UNDECIDED) -> None:
        """by: what was decided before, by an earlier sidecar."""
        self.by = by
        self._device = DeviceSteps()
        self._held: list[StepTable] = []  # the host's, until it is decided

    def add(self, records: npt.NDArray[np.void], steps: StepTable, *, on_device: bool | None) -> StepTable | None:
        """The steps to judge the rank by that are known now; None where there are none.

        steps: the host's, of these records. on_device: whether the rank computes on one; None where that is not known.
        """
        if self.by == HOST:
            return steps
        timed = self._device.add(records, steps)
        if len(timed):
            self.by, self._held = DEVICE, []
        if self.by == DEVICE:
            return timed if len(timed) else None
        self._held.append(steps)
        held = sum(map(len, self._held))
        if on_device is False or held >= (SILENT_AFTER_STEPS if on_device else _KNOWN_AFTER_STEPS):
            return self.rest()
        return None

    def rest(self) -> StepTable | None:
        """What is held back: no more comes, so it is judged by the host's clock, if by any."""
        if self.by != UNDECIDED or not self._held:
            return None
        held, self._held, self.by = concatenate(self._held), [], HOST
        return held
