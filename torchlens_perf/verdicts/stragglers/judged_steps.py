"""The clock by which a rank is judged, host or device, and the rank's steps by this clock. Pure.

A rank that computes on a device is judged by the device's clock if device times are recorded for
each step. Otherwise, the rank is judged by the host's clock. The clock is chosen once, in the first
steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.device_steps import DeviceStepJoin
from torchlens_perf.analysis.statistics.step_bins import concatenate_tables
from torchlens_perf.run.records import StepTable

HOST, DEVICE, UNDECIDED = "host", "device", ""
# If no device times are recorded in this many steps, there will be no device times.
SILENT_AFTER_STEPS = 64
# After this many steps, it is known whether the rank computes on a device. The width of rows is
# also chosen after this many steps.
_KNOWN_AFTER_STEPS = 8


class JudgedSteps:
    """Selects the steps by which one process is judged. Records must be added in order."""

    def __init__(self, by: str = UNDECIDED) -> None:
        """by: the clock that an earlier sidecar has chosen."""
        self.by = by
        self._device: DeviceStepJoin | None = DeviceStepJoin()
        # Steps by the host's clock, until the clock is decided.
        self._held: list[StepTable] = []

    def add_records(
        self, records: npt.NDArray[np.void], steps: StepTable, *, on_device: bool | None
    ) -> StepTable | None:
        """Add records, and return the steps that are newly ready to be judged; None without any.

        steps: the steps of these records by the host's clock. on_device: True if the rank computes
        on a device; None if not known.
        """
        if self.by == HOST or self._device is None:
            return steps
        timed = self._device.add_records(records, steps)
        if len(timed):
            self.by, self._held = DEVICE, []
        if self.by == DEVICE:
            return timed if len(timed) else None
        self._held.append(steps)
        held = sum(map(len, self._held))
        if on_device is False or held >= (SILENT_AFTER_STEPS if on_device else _KNOWN_AFTER_STEPS):
            return self.decide_for_host()
        return None

    def decide_for_host(self) -> StepTable | None:
        """Choose the host's clock if none was chosen before. Return the steps that have waited for
        this decision; None without any."""
        if self.by != UNDECIDED or not self._held:
            return None
        held, self._held, self.by = concatenate_tables(self._held), [], HOST
        self._device = None  # It has a copy of the steps.
        return held
