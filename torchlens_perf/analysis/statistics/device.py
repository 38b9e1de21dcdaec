"""Statistics of one rank's device times, and of the device's lag behind the host. Pure."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.step_bins import OTHER_WORK
from torchlens_perf.run.device.merged_rows import SECTION, unpack_row
from torchlens_perf.run.records import StepTable
from torchlens_perf.run.ring import UNKNOWN_NS, Kind, lookup_name
from torchlens_perf.run.sketch import Sketch, decode_windows

# A device had no more work queued if it ends a phase within this time after its host does. An event
# on an idle stream takes a few microseconds. The last kernels of a phase take tens of microseconds.
CAUGHT_UP_NS = 100_000
_PHASES = {
    int(Kind.STEP): "step",
    int(Kind.FORWARD): "forward",
    int(Kind.RECOMPUTE): "recompute",
    int(Kind.BACKWARD): "backward",
    int(Kind.OPTIMIZER): "optimizer",
}
# Phases that end right after the host has issued work. The end of a step is not included, because
# it may follow a wait for the device (loss.item()).
_ISSUING = (int(Kind.FORWARD), int(Kind.BACKWARD))


def phase_durations_ns(records: npt.NDArray[np.void]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the device times of steps and phases in these records, by phase."""
    records = records[records["kind"] == Kind.DEVICE]
    found = {
        phase: records["duration_ns"][records["value0"] == kind] for kind, phase in _PHASES.items()
    }
    return {phase: durations_ns for phase, durations_ns in found.items() if len(durations_ns)}


def mask_fed(records: npt.NDArray[np.void], spans: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return for each span whether the device had work queued from its begin to its end.

    Otherwise the device may have waited for its host inside the span, and that wait is no work of
    the span. The device's lag is known at the end of each record, and is checked at all ends inside
    the span and at the last end before it. With an unknown lag, the result is False.
    """
    ends_ns = records["start_ns"].astype(np.int64) + records["duration_ns"].astype(np.int64)
    order = np.argsort(ends_ns, kind="stable")
    ends_ns, behind_ns = ends_ns[order], records["value1"][order].astype(np.int64)
    fed = (behind_ns >= CAUGHT_UP_NS) & (behind_ns != UNKNOWN_NS)
    starved = np.concatenate([[0], np.cumsum(~fed)])
    start_ns = spans["start_ns"].astype(np.int64)
    first = np.searchsorted(ends_ns, start_ns, side="right") - 1
    last = np.searchsorted(ends_ns, start_ns + spans["duration_ns"].astype(np.int64), side="right")
    return starved[last] == starved[first.clip(min=0)]


@dataclasses.dataclass
class DeviceStatistics:
    """Device time of phases, modules and sections, from DEVICE records in any order."""

    phases: dict[str, Sketch] = dataclasses.field(default_factory=dict)
    modules: dict[str, Sketch] = dataclasses.field(default_factory=dict)
    """Times of all timed calls, including the time for which the device waited for its host."""
    fed_modules: dict[str, Sketch] | None = None
    """Times of the calls in which the device always had work queued, see mask_fed(); None before
    the first record, and in states that were written before such calls were told apart."""
    sections: dict[str, Sketch] = dataclasses.field(default_factory=dict)
    judged: Sketch = dataclasses.field(default_factory=Sketch)
    """Durations of training steps for which all device times are known."""
    work: Sketch = dataclasses.field(default_factory=Sketch)
    """The durations in `judged` without the stalls of the device's compute stream."""
    behind: Sketch = dataclasses.field(default_factory=Sketch)
    """Delay from the end of a forward or backward pass on the host to its end on the device."""
    caught_up: int = 0
    """Number of passes that the device ended within CAUGHT_UP_NS after the host."""
    stamped: dict[str, Sketch] = dataclasses.field(default_factory=dict)
    """Times of device sections, measured by stamp kernels, also in captured graphs."""
    merged: dict[str, dict[str, int | float]] = dataclasses.field(default_factory=dict)
    """Statistics of device sections over all ranks in the last window; only on rank 0."""
    stamped_lost: int = 0
    """Number of times of device sections that were overwritten before they were counted."""
    stray_records: int = 0
    """Number of records that were dropped, because other records of the same window were lost."""

    def add_records(self, records: npt.NDArray[np.void], names: list[str]) -> None:
        """Add the DEVICE, SKETCH and MERGED records. All other records are ignored."""
        windows, stray = decode_windows(records[records["kind"] == Kind.SKETCH])
        self.stray_records += stray
        self.stamped_lost += sum(window.lost for _, window in windows)
        for name_id, window in windows:
            self.stamped.setdefault(lookup_name(names, name_id), Sketch()).merge(window.sketch)
        for record in records[records["kind"] == Kind.MERGED]:
            row = unpack_row(record, names)
            if row.row == SECTION:
                self.merged[row.name] = {
                    "step": row.step,
                    "count": row.times,
                    "mean_ns": row.sum_ns / max(1, row.times),
                    "p50_ns": row.p50_ns,
                    "p99_ns": row.p99_ns,
                    "rank_median_ns": row.median_ns,
                    "rank_mad_ns": row.mad_ns,
                    "slowest": row.slowest,
                    "score": row.score,
                }
        records = records[records["kind"] == Kind.DEVICE]
        if not len(records):
            return
        for phase, durations_ns in phase_durations_ns(records).items():
            self.phases.setdefault(phase, Sketch()).add(durations_ns)
        if self.fed_modules is None:
            self.fed_modules = {}
        kinds = records["value0"].astype(np.int64)
        modules = records[kinds == Kind.MODULE]
        for of_kind, table in (
            (modules, self.modules),
            (modules[mask_fed(records, modules)], self.fed_modules),
            (records[kinds == Kind.SECTION], self.sections),
        ):
            for name_id in np.unique(of_kind["name_id"]).tolist():
                table.setdefault(lookup_name(names, name_id), Sketch()).add(
                    of_kind["duration_ns"][of_kind["name_id"] == name_id]
                )
        behind_ns = records["value1"][np.isin(kinds, _ISSUING)].astype(np.int64)
        behind_ns = behind_ns[behind_ns != UNKNOWN_NS]
        self.behind.add(behind_ns)
        self.caught_up += int((behind_ns < CAUGHT_UP_NS).sum())

    def add_steps(self, steps: StepTable) -> None:
        """Add steps by the device's clock, see device_steps.py.

        Steps with OTHER_WORK are skipped.
        """
        steps = steps.select_rows((steps.flags & OTHER_WORK) == 0)
        self.judged.add(steps.duration_ns)
        self.work.add(steps.own_ns)

    @property
    def timed_steps(self) -> int:
        """Number of steps for which the device's time is known."""
        return self.phases["step"].count if "step" in self.phases else 0

    @property
    def caught_up_share(self) -> float | None:
        """Fraction of forward and backward passes that the device ended within CAUGHT_UP_NS after
        the host.

        The value is None if there are no passes.
        """
        return self.caught_up / self.behind.count if self.behind.count else None
