"""A rank's own time in a step: how long the step would take it if it never waited for another rank. Pure.

A device executes what its host issues. Two marks of one point give two lines: when the host issued it, and when the
device came to it. Between the marks of a part, the host needs `issue` to issue the work and the device needs `busy` to
execute it, and the device begins the part `lag` after the host. The device then ends the part after the longer of
`busy` and `issue - lag`.

The device's own clock shows that time only on the rank that the others wait for, the critical one. Another rank waits
in a collective while its host goes on. Its lag grows by that wait, and hides the host's time in the parts that follow.
All ranks are therefore compared with the critical rank's lag: max(busy, issue - lag of the critical rank). Where the
device is the bottleneck the lag is long and the device's time counts. Where the host is, the lag is short and the
host's time counts.

Where both take long in one part, as kernels after host code, that is too little: without its larger lag, up to so much
more of the host's time would have come before the device's. A rank is then taken to have as much of it as the critical
one has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.run.records import OWN_PARTS

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.floating[Any]]

_MOST = 0.5  # of a part's own time, that its host needs where the device waits for it
_BACKWARD, _RECOMPUTE = OWN_PARTS.index("backward"), OWN_PARTS.index("recompute")


def critical_rank(wait_ns: Floats) -> npt.NDArray[np.int64]:
    """Return the index of the rank that the others wait for, by row. It is the one that waits least.

    wait_ns: [ranks, rows].
    """
    critical: npt.NDArray[np.int64] = np.where(np.isnan(wait_ns), np.inf, wait_ns).argmin(axis=0)
    return critical


def own_time(
    device_ns: Floats, issue_ns: Floats, lag_ns: Floats, critical: npt.NDArray[np.int64]
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return each rank's own time by part, and whether the device waits for its host there.

    Both are [ranks, rows, parts], as are the first three arguments.

    device_ns: without stalls. critical: of each row, the rank that the others wait for.
    """
    rows = np.arange(len(critical))
    critical_lag_ns = lag_ns[critical, rows]
    busy_ns, host_ns = _with_recompute(device_ns), np.maximum(_with_recompute(issue_ns) - critical_lag_ns, 0)
    least_ns = np.maximum(busy_ns, host_ns)
    most_ns = np.maximum(busy_ns + np.clip(lag_ns - critical_lag_ns, 0, host_ns), least_ns)
    as_critical_ns = least_ns[critical, rows] - host_ns[critical, rows] + host_ns
    own_ns: Floats = device_ns + np.clip(as_critical_ns, least_ns, most_ns) - busy_ns
    return own_ns, host_ns >= _MOST * own_ns


def _with_recompute(parts_ns: Floats) -> Floats:
    """Return the parts with recomputation in the backward pass, in which the host issues it."""
    joined = parts_ns.copy()
    joined[..., _BACKWARD] += joined[..., _RECOMPUTE]
    joined[..., _RECOMPUTE] = 0
    return joined
