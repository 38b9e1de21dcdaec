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
    begin_ns: Integers
    duration_ns: Integers


def find_host_gaps(
    records: npt.NDArray[np.void], kinds: npt.NDArray[np.uint8], steps: StepTable
) -> HostGaps:
    """Return the gaps of each step, which add up to its host code and this tool's time.

    Steps whose optimizer calls a closure are left out: their phases are inside the optimizer.
    """
    has_closure = np.isin(steps.step, records["step"][kinds == Kind.CLOSURE])
    here = (records["flags"] & Flag.OTHER_THREAD) == 0
    rows = np.flatnonzero(np.isin(kinds, _PHASES) & here)
    rows = rows[np.isin(records["step"][rows], steps.step[~has_closure])]
    at, border, begins_ns, ends_ns = _sort_borders(records[rows], kinds[rows], steps)
    # Phases inside an outer phase begin before its end.
    latest_ns = np.concatenate([[0], np.maximum.accumulate(ends_ns)[:-1]])
    is_inside = (begins_ns < latest_ns) & (border != _START)
    outermost = np.maximum.accumulate(np.where(is_inside, 0, np.arange(len(border))))
    before = border[outermost[:-1]]
    chosen = (at[1:] == at[:-1]) & ~is_inside[1:] & ~has_closure[at[1:]]
    gaps_ns = (begins_ns - latest_ns).clip(min=0)[1:]
    return HostGaps(
        at[1:][chosen],
        (before << 8 | border[1:])[chosen],
        latest_ns[1:][chosen],
        gaps_ns[chosen],
    )


def _sort_borders(
    phases: npt.NDArray[np.void], kinds: npt.NDArray[np.uint8], steps: StepTable
) -> tuple[Integers, Integers, Integers, Integers]:
    """Return the phases and the ends of the steps in the order of time, outer phases first.

    The columns are the index of the step, the kind, and begin and end in ns. A phase that crosses
    a border of its step counts inside the step only.
    """
    of_phase, each = np.searchsorted(steps.step, phases["step"]), np.arange(len(steps))
    last_ns, began_ns = steps.start_ns + steps.duration_ns, phases["start_ns"].astype(np.int64)
    ended_ns = began_ns + phases["duration_ns"].astype(np.int64)
    at = np.concatenate([each, of_phase, each])
    border = np.concatenate(
        [np.full(len(each), _START), kinds.astype(np.int64), np.full(len(each), _END)]
    )
    begins_ns = np.concatenate([steps.start_ns, began_ns.clip(steps.start_ns[of_phase]), last_ns])
    ends_ns = np.concatenate([steps.start_ns, np.minimum(ended_ns, last_ns[of_phase]), last_ns])
    order = np.lexsort((-ends_ns, begins_ns, border == _END, border != _START, at))
    return at[order], border[order], begins_ns[order], ends_ns[order]


def split_gap(name: str) -> tuple[str, str]:
    """Return what is before and after a gap, from its name."""
    before, _, after = name.partition(">")
    return before, after


def name_gap(key: int) -> str:
    """Return the names of what is before and after a gap, such as "backward>optimizer"."""
    return f"{_NAMES[key >> 8]}>{_NAMES[key & 0xFF]}"
