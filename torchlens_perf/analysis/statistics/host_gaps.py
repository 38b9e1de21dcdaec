"""Find between which phases the host code of a step is. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.run.ring import Flag, Kind

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.records import StepTable

    Integers = npt.NDArray[np.int64]

_START, _END = 0, int(Kind.STEP)
_NAMES = {
    _START: "start",
    int(Kind.DATA): "data",
    int(Kind.FORWARD): "forward",
    int(Kind.RECOMPUTE): "recompute",
    int(Kind.BACKWARD): "backward",
    int(Kind.OPTIMIZER): "optimizer",
    int(Kind.WAIT): "communication",
    _END: "end",
}
_PHASES = [kind for kind in _NAMES if kind not in (_START, _END)]


class HostGaps(NamedTuple):
    """Columns of the gaps between the outermost phases of steps."""

    at: Integers
    """Index of the step."""
    key: Integers
    """See name_gap()."""
    duration_ns: Integers


def find_host_gaps(
    records: npt.NDArray[np.void], kinds: npt.NDArray[np.uint8], steps: StepTable
) -> HostGaps:
    """Return the gaps of each step, which add up to its host code and this tool's time.

    Steps whose optimizer calls a closure are left out: their phases are inside the optimizer.
    """
    here = (records["flags"] & Flag.OTHER_THREAD) == 0
    closures = records["step"][kinds == Kind.CLOSURE]
    rows = np.flatnonzero(np.isin(kinds, _PHASES) & here)
    rows = rows[np.isin(records["step"][rows], steps.step[~np.isin(steps.step, closures)])]
    at, each = np.searchsorted(steps.step, records["step"][rows]), np.arange(len(steps))
    ends_ns = steps.start_ns + steps.duration_ns
    began_ns = records["start_ns"][rows].astype(np.int64)
    stopped_ns = began_ns + records["duration_ns"][rows].astype(np.int64)
    # A phase that crosses a border of its step counts inside the step only.
    begins_ns = np.concatenate([steps.start_ns, began_ns.clip(steps.start_ns[at]), ends_ns])
    stops_ns = np.concatenate([steps.start_ns, np.minimum(stopped_ns, ends_ns[at]), ends_ns])
    at = np.concatenate([each, at, each])
    border = np.repeat([_START, -1, _END], [len(steps), len(rows), len(steps)])
    border[border < 0] = kinds[rows]
    order = np.lexsort((-stops_ns, begins_ns, border == _END, border != _START, at))
    at, border, begins_ns, stops_ns = (of[order] for of in (at, border, begins_ns, stops_ns))
    # Time inside an outer phase is before the latest end so far.
    gaps_ns = (begins_ns[1:] - np.maximum.accumulate(stops_ns)[:-1]).clip(min=0)
    inside = np.concatenate([[False], begins_ns[1:] < np.maximum.accumulate(stops_ns)[:-1]])
    before = border[np.maximum.accumulate(np.where(inside, 0, np.arange(len(border))))]
    chosen = (at[1:] == at[:-1]) & ~inside[1:] & ~np.isin(steps.step, closures)[at[1:]]
    return HostGaps(at[1:][chosen], (before[:-1] << 8 | border[1:])[chosen], gaps_ns[chosen])


def name_gap(key: int) -> str:
    """Return the names of what is before and after a gap, such as "backward>optimizer"."""
    return f"{_NAMES[key >> 8]}>{_NAMES[key & 0xFF]}"
