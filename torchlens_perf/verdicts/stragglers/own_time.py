"""A rank's own time in a step: the time that the step would take if the rank never waited for
another rank. Pure.

A device executes the work that its host issues. Each mark has two times: when the host issued it,
and when the device reached it. For each part, the host needs `issue` to issue the work, the device
needs `busy` to execute it, and the device begins the part `lag` after the host. The device then
ends the part after the longer of `busy` and `issue - lag`.

The device's own clock shows that time only on the rank that the others wait for, the critical one.
Another rank waits in a collective while its host goes on. Its lag grows by that wait, and hides the
host's time in the parts that follow. All ranks are therefore compared with the critical rank's lag:
max(busy, issue - lag of the critical rank). Where the device is the bottleneck the lag is long and
the device's time counts. If the host is the bottleneck, the lag is short and its time counts.

If host and device both take long in one part, such as kernels after host code, this maximum is too
small. Without its larger lag, the rank would need up to that much more time. Within this limit, its
device time beyond the host's time is assumed to be that of the critical rank.
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
# Share of own time above which the devices' own clocks do not show where the time goes.
_HIDDEN = 0.03
# The device waits for its host in a part if the host needs at least this share of the part's own
# time.
_MOST = 0.5
_LAUNCHES = [place for place, part in enumerate(OWN_PARTS) if part not in ("data", "host")]
_COMMUNICATION = PARTS.index("communication")
_BACKWARD, _RECOMPUTE = OWN_PARTS.index("backward"), OWN_PARTS.index("recompute")


def critical_rank(wait_ns: Floats) -> npt.NDArray[np.int64]:
    """Return the index of the rank that the others wait for, by row. It is the one that waits
    least.

    wait_ns: [ranks, rows].
    """
    critical: npt.NDArray[np.int64] = np.where(np.isnan(wait_ns), np.inf, wait_ns).argmin(axis=0)
    return critical


@dataclasses.dataclass(frozen=True)
class OwnTime:
    """Own times of ranks that are judged by their devices: means over the ranks and some rows."""

    parts_ns: tuple[float, ...]
    """Own time in a step, for each of OWN_PARTS."""
    launch_share: float
    """Share of own time in which the device waits for its host to issue work."""
    hidden_share: float
    """Share of own time that the device's clock does not show, as hosts go on while devices wait
    for other ranks."""

    @property
    def is_hidden(self) -> bool:
        """True if so much is hidden that the devices' own clocks do not show where the time
        goes."""
        return self.hidden_share >= _HIDDEN


class Lines(NamedTuple):
    """Device times without stalls, host times to issue the work, and lags of devices behind hosts:
    [..., parts]."""

    device_ns: Floats
    issue_ns: Floats
    lag_ns: Floats


def own_time(ranks: Lines, critical: Lines) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return each rank's own time by part, and whether the device waits for its host there: [ranks,
    rows, parts].

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
    """Return each rank's own time in each of its steps. For steps that not all ranks have, return
    work.

    tables: steps by the devices' clocks, in ascending order, of ranks that do the same work.
    """
    work_ns = [table.work_ns for table in tables]
    steps = functools.reduce(np.intersect1d, [table.step for table in tables])
    if len(tables) < 2 or not len(steps):
        return work_ns
    at = [np.searchsorted(table.step, steps) for table in tables]

    def of_all(column: str) -> Floats:
        values: list[Any] = [
            getattr(table, column)[rows] for table, rows in zip(tables, at, strict=True)
        ]
        return np.stack(values).astype(np.float64)

    issue_ns, lag_ns = (of_all(column)[..., OWN_COLUMNS] for column in ("issue_ns", "lag_ns"))
    ranks = Lines(of_all("work_by_part_ns"), issue_ns, lag_ns)
    critical, rows = critical_rank(of_all("parts_ns")[..., _COMMUNICATION]), np.arange(len(steps))
    own_ns, _ = own_time(ranks, Lines(*(line[critical, rows] for line in ranks)))
    known = (issue_ns > 0).any(axis=2).all(axis=0)
    for rank, rows_of_rank in enumerate(at):
        work_ns[rank][rows_of_rank[known]] = own_ns[rank, known].sum(axis=1)
    return work_ns


def mean_own_time(
    own_ns: Floats, by_host: npt.NDArray[np.bool_], device_ns: Floats
) -> OwnTime | None:
    """Return the mean of own times; None if no row is known.

    All arguments are [ranks, rows, parts].
    """
    known = np.isfinite(own_ns).all(axis=2)
    own_ns, by_host, device_ns = own_ns[known], by_host[known], device_ns[known]
    total_ns = float(own_ns.sum(dtype=np.float64))
    if not total_ns:
        return None
    launch_ns = float(own_ns[:, _LAUNCHES][by_host[:, _LAUNCHES]].sum(dtype=np.float64))
    hidden_share = 1 - float(device_ns.sum(dtype=np.float64)) / total_ns
    return OwnTime(
        tuple(own_ns.mean(axis=0, dtype=np.float64).tolist()), launch_ns / total_ns, hidden_share
    )


def _busy_and_host(lines: Lines, critical_lag_ns: Floats) -> tuple[Floats, Floats]:
    busy_ns, issue_ns = _with_recompute(lines.device_ns), _with_recompute(lines.issue_ns)
    return busy_ns, np.maximum(issue_ns - critical_lag_ns, 0)


def _with_recompute(parts_ns: Floats) -> Floats:
    """Return the parts with recomputation added to the backward pass, in which the host issues
    it."""
    joined = parts_ns.copy()
    joined[..., _BACKWARD] += joined[..., _RECOMPUTE]
    joined[..., _RECOMPUTE] = 0
    return joined
