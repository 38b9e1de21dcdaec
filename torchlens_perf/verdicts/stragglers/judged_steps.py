"""The clock that a rank is judged by, host or device, and the rank's steps by that clock. Pure.

A rank that computes on a device is judged by the device's clock if device times are recorded for
each step. Otherwise it is judged by the host's clock. The clock is decided once, before the first
rows, and never changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.device_steps import DeviceStepJoin
from torchlens_perf.analysis.statistics.step_bins import concatenate_tables

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.run.records import StepTable

HOST, DEVICE, UNDECIDED = "host", "device", ""
# A device without any device times after this many steps is not timed.
SILENT_AFTER_STEPS = 64
# Number of steps after which the rank's device would be known. The width of rows is chosen by as
# many steps.
_KNOWN_AFTER_STEPS = 8


class JudgedSteps:
    """The steps of one process by the clock that it is judged by. add() takes its records in
    order."""

    def __init__(self, by: str = UNDECIDED) -> None:
        """by: the decision of an earlier sidecar."""
        self.by = by
        self._device = DeviceStepJoin()
        # Steps by the host's clock, until the clock is decided.
        self._held: list[StepTable] = []

    def add(
        self, records: npt.NDArray[np.void], steps: StepTable, *, on_device: bool | None
    ) -> StepTable | None:
        """Return the newly known steps to judge the rank by; None without any.

        steps: steps of these records, by the host's clock. on_device: True if the rank computes on
        a device; None if that is not known.
        """
        if self.by == HOST:
            return steps
        timed = self._device.add_records(records, steps)
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
        """Return the steps that were held back, by the host's clock, and decide for that clock."""
        if self.by != UNDECIDED or not self._held:
            return None
        held, self._held, self.by = concatenate_tables(self._held), [], HOST
        return held
