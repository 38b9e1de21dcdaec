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

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from torchlens_perf.run.records import OWN_COLUMNS, OWN_PARTS, PARTS

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.records import StepTable

Floats: TypeAlias = "npt.NDArray[np.floating[Any]]"
_HIDDEN = 0.03  # of own time: a share from which on devices' own clocks do not tell what ranks do
_MOST = 0.5  # of a part's own time, that its host needs where the device waits for it
_LAUNCHES = [place for place, part in enumerate(OWN_PARTS) if part not in ("data", "host")]
_COMMUNICATION = PARTS.index("communication")
_BACKWARD, _RECOMPUTE = OWN_PARTS.index("backward"), OWN_PARTS.index("recompute")


def critical_rank(wait_ns: Floats) -> npt.NDArray[np.int64]:
    """Return the index of the rank that the others wait for, by row. It is the one that waits least.

    wait_ns: [ranks, rows].
    """
    critical: npt.NDArray[np.int64] = np.where(np.isnan(wait_ns), np.inf, wait_ns).argmin(axis=0)
    return critical


@dataclasses.dataclass(frozen=True)
class OwnTime:
    """Own times of ranks that are judged by their devices: means over the ranks and some rows."""

    parts_ns: tuple[float, ...]
    """Of each of OWN_PARTS, in a step."""
    launch_share: float
    """Share of it in which the device waits for its host to issue work."""
    hidden_share: float
    """Share of it that is not in the device's own clock, as its host goes on while the device waits for other ranks."""

    @property
    def is_hidden(self) -> bool:
        """Whether so much is hidden that devices' own clocks do not tell what ranks do."""
        return self.hidden_share >= _HIDDEN


class Lines(NamedTuple):
    """What devices take, without stalls, what hosts need to issue it, and how far devices lag behind: [..., parts]."""

    device_ns: Floats
    issue_ns: Floats
    lag_ns: Floats


def own_time(ranks: Lines, critical: Lines) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return each rank's own time by part, and whether the device waits for its host there: [ranks, rows, parts].

    ranks: [ranks, rows, parts]. critical: [rows, parts], of the rank that the others wait for.
    """
    busy_ns, host_ns = _busy_and_host(ranks, critical.lag_ns)
    critical_busy_ns, critical_host_ns = _busy_and_host(critical, critical.lag_ns)
    least_ns = np.maximum(busy_ns, host_ns)
    most_ns = np.maximum(busy_ns + np.clip(ranks.lag_ns - critical.lag_ns, 0, host_ns), least_ns)
    as_critical_ns = np.maximum(critical_busy_ns - critical_host_ns, 0) + host_ns
    own_ns: Floats = ranks.device_ns + np.clip(as_critical_ns, least_ns, most_ns) - busy_ns
    return own_ns, host_ns >= _MOST * own_ns


def own_work_ns(tables: Sequence[StepTable]) -> list[npt.NDArray[np.int64]]:
    """Return each rank's own time in each of its steps. Where not all ranks have the step, it is work.

    tables: steps by the devices' clocks of ranks that do the same, in ascending order.
    """
    work_ns = [table.work_ns for table in tables]
    steps = functools.reduce(np.intersect1d, [table.step for table in tables])
    if len(tables) < 2 or not len(steps):
        return work_ns
    at = [np.searchsorted(table.step, steps) for table in tables]

    def of_all(column: str) -> Floats:
        values: list[Any] = [getattr(table, column)[rows] for table, rows in zip(tables, at, strict=True)]
        return np.stack(values).astype(np.float64)

    issue_ns, lag_ns = (of_all(column)[..., OWN_COLUMNS] for column in ("issue_ns", "lag_ns"))
    ranks = Lines(of_all("work_by_part_ns"), issue_ns, lag_ns)
    critical, rows = critical_rank(of_all("parts_ns")[..., _COMMUNICATION]), np.arange(len(steps))
    own_ns, _ = own_time(ranks, Lines(*(line[critical, rows] for line in ranks)))
    known = (issue_ns > 0).any(axis=2).all(axis=0)
    for rank, rows_of_rank in enumerate(at):
        work_ns[rank][rows_of_rank[known]] = own_ns[rank, known].sum(axis=1)
    return work_ns


def mean_own_time(own_ns: Floats, by_host: npt.NDArray[np.bool_], device_ns: Floats) -> OwnTime | None:
    """Return the mean of own times; None where there are none. All are [ranks, rows, parts]."""
    known = np.isfinite(own_ns).all(axis=2)
    own_ns, by_host, device_ns = own_ns[known], by_host[known], device_ns[known]
    total_ns = float(own_ns.sum(dtype=np.float64))
    if not total_ns:
        return None
    launch_ns = float(own_ns[:, _LAUNCHES][by_host[:, _LAUNCHES]].sum(dtype=np.float64))
    hidden_share = 1 - float(device_ns.sum(dtype=np.float64)) / total_ns
    return OwnTime(tuple(own_ns.mean(axis=0, dtype=np.float64).tolist()), launch_ns / total_ns, hidden_share)


def _busy_and_host(lines: Lines, critical_lag_ns: Floats) -> tuple[Floats, Floats]:
    busy_ns, issue_ns = _with_recompute(lines.device_ns), _with_recompute(lines.issue_ns)
    return busy_ns, np.maximum(issue_ns - critical_lag_ns, 0)


def _with_recompute(parts_ns: Floats) -> Floats:
    """Return the parts with recomputation in the backward pass, in which the host issues it."""
    joined = parts_ns.copy()
    joined[..., _BACKWARD] += joined[..., _RECOMPUTE]
    joined[..., _RECOMPUTE] = 0
    return joined
