"""A rank's own time: the time that a step would take if the rank never waited for another rank.
Pure.

A device executes the work that its host issues. For each part of the step, three times are known:
the host needs `issue` to issue the work, the device needs `busy` to execute it, and the device
begins the part `lag` after the host. The device then ends the part after the longer of `busy` and
`issue - lag`.

The critical rank is the rank for which all other ranks wait. Only on the critical rank, the
device's clock shows the own time. Any other rank waits in a collective while its host issues more
work. This wait increases its lag, and the lag hides the host's time in later parts. The own time of
all ranks is therefore computed with the lag of the critical rank: max(busy, issue - lag of the
critical rank). If devices are the bottleneck, this lag is long and the device's time counts. If
hosts are the bottleneck, the lag is short and the host's time counts.

If both host and device need much time in one part, for example for kernels after host code, this
maximum is too small. Without its larger lag, the rank would need more time, at most the difference
of the lags. Up to this limit, the rank's device time beyond the host's time is assumed to be that
of the critical rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.records import OWN_COLUMNS, OWN_PARTS, PARTS, StepTable

Floats: TypeAlias = "npt.NDArray[np.floating[Any]]"
# If the devices' clocks hide at least this share of own time, they do not show how a step spends
# its time.
_HIDDEN = 0.03
# The device waits for its host in a part of the step if the host needs at least this share of the
# part's own time.
_MOST = 0.5
_COMMUNICATION = PARTS.index("communication")
_BACKWARD, _RECOMPUTE = OWN_PARTS.index("backward"), OWN_PARTS.index("recompute")


def find_critical_ranks(wait_ns: Floats) -> npt.NDArray[np.int64]:
    """Return the index of the critical rank in each row: the rank that waits least.

    wait_ns: [ranks, rows].
    """
    return np.where(np.isnan(wait_ns), np.inf, wait_ns).argmin(axis=0)


@dataclasses.dataclass(frozen=True)
class OwnTime:
    """Mean own time of ranks that are judged by their devices, over these ranks and some rows."""

    parts_ns: tuple[float, ...]
    """Own time in a step, for each of OWN_PARTS."""
    hidden_share: float
    """Share of own time that the device's clock does not show. Host code is hidden while the device
    waits for other ranks."""

    @property
    def is_hidden(self) -> bool:
        """True if the devices' clocks hide too much to show how a step spends its time."""
        return self.hidden_share >= _HIDDEN


class PartTimes(NamedTuple):
    """Times of each part of a step, with the shape [..., parts]."""

    device_ns: Floats
    """Time of the device without waits for other ranks."""
    issue_ns: Floats
    """Time of the host to issue the work."""
    lag_ns: Floats
    """Time from the part's start on the host to its start on the device."""


def compute_own_time(ranks: PartTimes, critical: PartTimes) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return each rank's own time by part, and whether the device waits for its host in the part.

    ranks: times of all ranks, [ranks, rows, parts], which is also the shape of the results.
    critical: times of the critical rank, [rows, parts].
    """
    busy_ns, host_ns = _busy_and_host_ns(ranks, critical.lag_ns)
    critical_busy_ns, critical_host_ns = _busy_and_host_ns(critical, critical.lag_ns)
    least_ns = np.maximum(busy_ns, host_ns)
    most_ns = np.maximum(busy_ns + np.clip(ranks.lag_ns - critical.lag_ns, 0, host_ns), least_ns)
    as_critical_ns = np.maximum(critical_busy_ns - critical_host_ns, 0) + host_ns
    own_ns: Floats = ranks.device_ns + np.clip(as_critical_ns, least_ns, most_ns) - busy_ns
    return own_ns, host_ns >= _MOST * own_ns


def compute_own_work_ns(tables: Sequence[StepTable]) -> list[npt.NDArray[np.int64]]:
    """Return each rank's own time in each of its steps.

    For steps that not all ranks have, return the device's work. tables: steps by the devices'
    clocks, in ascending order, of ranks that do the same work.
    """
    work_ns = [table.work_ns for table in tables]
    steps = functools.reduce(np.intersect1d, [table.step for table in tables])
    if len(tables) < 2 or not len(steps):
        return work_ns
    at = [np.searchsorted(table.step, steps) for table in tables]

    def stack_column(column: str) -> Floats:
        values: list[Any] = [
            getattr(table, column)[rows] for table, rows in zip(tables, at, strict=True)
        ]
        return np.stack(values).astype(np.float64)

    issue_ns, lag_ns = (stack_column(column)[..., OWN_COLUMNS] for column in ("issue_ns", "lag_ns"))
    ranks = PartTimes(stack_column("work_by_part_ns"), issue_ns, lag_ns)
    critical = find_critical_ranks(stack_column("parts_ns")[..., _COMMUNICATION])
    rows = np.arange(len(steps))
    own_ns, _ = compute_own_time(ranks, PartTimes(*(line[critical, rows] for line in ranks)))
    known = (issue_ns > 0).any(axis=2).all(axis=0)
    for rank, rows_of_rank in enumerate(at):
        work_ns[rank][rows_of_rank[known]] = own_ns[rank, known].sum(axis=1)
    return work_ns


def average_own_time(own_ns: Floats, device_ns: Floats) -> OwnTime | None:
    """Return the mean own time; None if it is not known in any row, and for a single rank.

    A device that waits for no other rank hides nothing. Both arguments have the shape
    [ranks, rows, parts].
    """
    if len(own_ns) < 2:
        return None
    known = np.isfinite(own_ns).all(axis=2)
    own_ns, device_ns = own_ns[known], device_ns[known]
    total_ns = float(own_ns.sum(dtype=np.float64))
    if not total_ns:
        return None
    hidden_share = 1 - float(device_ns.sum(dtype=np.float64)) / total_ns
    return OwnTime(tuple(own_ns.mean(axis=0, dtype=np.float64).tolist()), hidden_share)


def _busy_and_host_ns(lines: PartTimes, critical_lag_ns: Floats) -> tuple[Floats, Floats]:
    busy_ns, issue_ns = _merge_recompute(lines.device_ns), _merge_recompute(lines.issue_ns)
    return busy_ns, np.maximum(issue_ns - critical_lag_ns, 0)


def _merge_recompute(parts_ns: Floats) -> Floats:
    """Add recomputation to the backward pass, in which its work is issued. Return the parts."""
    joined = parts_ns.copy()
    joined[..., _BACKWARD] += joined[..., _RECOMPUTE]
    joined[..., _RECOMPUTE] = 0
    return joined
