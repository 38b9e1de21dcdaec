"""Episodes: ranges of steps in which a rank was slow, and their measurements. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.stragglers.excess import CLIP, estimate_noise, limit_stalls
from torchlens_perf.verdicts.stragglers.window import SlidingWindow

_COMPUTE = ("forward", "backward")
# Forward and backward count as equally slow if the ratio of their relative excesses is below this.
# The limit is lower for host times, because the host of the last rank is slightly slower in all
# phases.
_MAX_RATIO, _MAX_RATIO_ON_HOSTS = 2.25, 1.5
# Host code between the phases shows how slow a host is if it takes this share of the usual time.
_MUCH_HOST_CODE = 0.05
# The host is slow if the device waits for it in more than this share of the rank's own time.
_MOST = 0.5
# The other ranks' usual times are computed from about this many ranks at most.
_SAMPLE = 256


class SharedCost(NamedTuple):
    """Costs of one of several ranks that are slow together, in ns per step."""

    cost_ns: float
    """The time by which steps would end earlier without all of them."""
    gain_ns: float
    """The same without this rank only, or without its slow node or position only."""
    lone_ns: float
    """The same if this rank was the only slow one."""
    from_step: int = 0
    """The first step in which all of them are slow."""


@dataclasses.dataclass(frozen=True)
class Episode:
    """A range of steps in which one rank was slow.

    Times are in ns, as means over the steps of the episode.
    """

    rank: int
    phase: str
    """The slow part of the step. It is one of OWN_PARTS; "compute" if forward and backward are
    slower by similar ratios; "cpu" if the rank lacked a CPU; or merged_windows.GAP if its device
    waited for its host."""
    judged_from_step: int
    """The first step of the rows on which the measurements are based."""
    from_start: bool
    """True if the episode begins with the first judged row. The rank may then have been slow
    before."""
    last_step: int
    until_step: int | None
    """The first step in which the rank was no longer slow; None while it is slow."""
    named_step: int
    """The step after which the rank was first named. Unlike judged_from_step, it never changes."""
    excess_ns: float
    phase_excess_ns: float
    cost_ns: float
    """The time by which the step would have ended earlier without the excess."""
    work_ns: float
    others_work_ns: float
    step_ns: float
    """Mean of all steps, also of those with a stall."""
    z_score: float
    """Mean excess with clipped values, in standard errors."""
    slow_share: float
    """Share of slow steps: those whose excess is at least half of the usual excess in slow
    steps."""
    slow_excess_ns: float
    """Median excess in slow steps."""
    more_workload: float
    """Additional workload of the rank, as a share of the other ranks' workload; 0 if not known."""
    shared: SharedCost | None = None
    """The cost of all slow ranks that do the same work. None if not known, or if there was never
    more than one."""
    by_host: bool = False
    """True if the host is slow: the device waits for it in the slow phase."""
    by_windows: bool = False
    """True if the episode was found in windows that devices merged, see merged_windows.py."""
    disputed: bool = False
    """True if merged windows should show the episode but do not."""

    @property
    def since_step(self) -> int:
        """The first slow step, as shown to users; 0 if the rank was slow from the start."""
        return 0 if self.from_start else self.judged_from_step

    @property
    def is_over(self) -> bool:
        """True if the rank is no longer slow."""
        return self.until_step is not None

    @property
    def key(self) -> tuple[int, int]:
        """A key of the episode that remains the same after a restart of the sidecar."""
        return self.rank, self.named_step


def measure_episode(
    episode: Episode,
    window: SlidingWindow,
    index: int,
    others: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
    series: npt.NDArray[np.float64],
    scale: float,
) -> Episode:
    """Return the episode with measurements from the rows with the numbers `keys`.

    index, others: positions of the rank and of the other ranks in `window`. series: the rank's
    excess in these rows. scale: the noise of the excess. Rows with a single stall are ignored,
    because they would hide the rank's usual behaviour.
    """
    last_step = int(keys[-1] + 1) * window.width - 1
    # The cost is a share of all step time, as in the table of lost time.
    step_ns = float(window.duration_ns[index, keys % window.columns].mean())
    usual_rows = limit_stalls(series, scale) == series
    keys, series = keys[usual_rows], series[usual_rows]
    at = keys % window.columns
    excess_ns = float(series.mean())
    high = series[series > excess_ns / 2]
    usual = float(np.median(high)) if len(high) else excess_ns
    slow = series > usual / 2
    sample = others[:: max(1, len(others) // _SAMPLE)]
    its_parts, its_host = window.own_time_by_part(np.ix_(np.array([index]), at))
    parts = its_parts[0].astype(np.float64)
    usual_parts = np.median(window.own_time_by_part(np.ix_(sample, at))[0], axis=0).astype(
        np.float64
    )
    load = window.workload[np.ix_(np.append(sample, index), at)].astype(np.float64)
    more_workload = episode.more_workload
    if np.isfinite(load).all() and (typical := float(np.median(load[:-1], axis=0).mean())) > 0:
        more_workload = float(load[-1].mean()) / typical - 1
    phase, phase_excess_ns, by_host = episode.phase, excess_ns, False
    if phase != "cpu":
        phase, phase_excess_ns = phase_of_excess(
            (parts - usual_parts).mean(axis=0),
            usual_parts.mean(axis=0),
            is_host_bound=_is_host_bound(parts, its_host[0], _COMPUTE),
        )
        by_host = _is_host_bound(parts, its_host[0], _COMPUTE if phase == "compute" else (phase,))
    return dataclasses.replace(
        episode,
        phase=phase,
        last_step=last_step,
        excess_ns=excess_ns,
        phase_excess_ns=phase_excess_ns,
        # The step ends with the slowest rank. The cost is the time by which the step would end
        # earlier without this rank. The time gained without a healthy rank is noise, and is
        # subtracted. The cost never exceeds the excess, which excludes waits because the rank lacks
        # a CPU.
        cost_ns=min(
            _gain_without_last_ns(_work_and_cpu_wait_ns(window, np.append(others, index), at)),
            max(0.0, excess_ns),
        ),
        work_ns=float(parts.sum(axis=1).mean()),
        others_work_ns=float(np.median(window.own_ns[np.ix_(sample, at)], axis=0).mean()),
        step_ns=step_ns,
        z_score=float(np.clip(series / scale, -CLIP, CLIP).sum() / np.sqrt(len(series))),
        slow_share=float(slow.mean()),
        slow_excess_ns=float(np.median(series[slow])) if slow.any() else excess_ns,
        more_workload=more_workload,
        by_host=by_host,
    )


def possible_gain_ns(
    window: SlidingWindow,
    index: int,
    others: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
    excess_ns: npt.NDArray[np.floating[Any]],
) -> float:
    """Return the mean time by which the rows `keys` would have ended earlier without the rank's
    excess.

    index, others: positions in `window`. The gain of each row is limited by the rank's excess in
    this row. Rows in which the rank was last for another reason therefore do not count.
    """
    own = _work_and_cpu_wait_ns(window, np.append(others, index), keys % window.columns)
    return float(np.clip(own[-1] - own[:-1].max(axis=0), 0, np.maximum(excess_ns, 0)).mean())


def compute_shared_costs(
    window: SlidingWindow,
    together: npt.NDArray[np.int64],
    others: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
    units: npt.NDArray[np.int64],
) -> list[SharedCost]:
    """Return, for each of several slow ranks, their shared cost in the rows `keys`.

    The time gained without as many healthy ranks is noise, and is subtracted. together, others:
    positions of the slow and of the healthy ranks in `window`. units: a number for each slow rank,
    equal for ranks that are repaired together. Rows with a single stall are ignored.
    """
    healthy, slow = (
        _work_and_cpu_wait_ns(window, ranks, keys % window.columns) for ranks in (others, together)
    )
    excess = slow.max(axis=0) - np.median(healthy, axis=0)
    usual_rows = limit_stalls(excess, estimate_noise(excess[None])) == excess
    healthy, slow = healthy[:, usual_rows], slow[:, usual_rows]
    teams = [
        healthy[first : first + len(together)].max(axis=0)
        for first in range(0, len(others), len(together))
    ]
    cost_ns = _gain_without_last_ns(np.stack([*teams, slow.max(axis=0)]))
    last_healthy = healthy.max(axis=0)
    noise_ns = float(np.median(_gains_without_each_ns(healthy)))
    lone = np.clip(slow - last_healthy, 0, None).mean(axis=1)
    _, unit_of_each = np.unique(units, return_inverse=True)
    of_units = np.zeros((unit_of_each.max() + 1, slow.shape[1]), slow.dtype)
    np.maximum.at(of_units, unit_of_each, slow)
    gains = _gains_without_each_ns(np.vstack([last_healthy, of_units]))[1 + unit_of_each]
    return [
        SharedCost(
            cost_ns,
            min(cost_ns, float(gain)),
            min(cost_ns, max(0.0, float(alone) - noise_ns)),
        )
        for gain, alone in zip(gains, lone, strict=True)
    ]


def _work_and_cpu_wait_ns(
    window: SlidingWindow, ranks: npt.NDArray[np.int64], at: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return work plus the time without a CPU, the times for which others wait: [ranks, rows]."""
    place = np.ix_(ranks, at)
    return window.own_ns[place] + np.nan_to_num(window.no_cpu_ns[place])


def _is_host_bound(
    own_ns: npt.NDArray[np.float64], by_host: npt.NDArray[np.bool_], phases: Sequence[str]
) -> bool:
    """Return True if the device waits for its host in most of the time of these phases.

    own_ns: own times; by_host: True where the device waits for its host. Both are [rows, parts].
    """
    places = [OWN_PARTS.index(phase) for phase in phases]
    by_host_ns = float(own_ns[:, places][by_host[:, places]].sum())
    return by_host_ns > _MOST * max(1.0, float(own_ns[:, places].sum()))


def _gain_without_last_ns(own: npt.NDArray[np.float32]) -> float:
    """Return the mean time by which rows would end earlier without the last rank in `own`.

    The median of the times gained without one of the other ranks is subtracted. own: times of
    [ranks or groups of ranks, rows].
    """
    gains = _gains_without_each_ns(own)
    return max(0.0, float(gains[-1] - np.median(gains[:-1])))


def _gains_without_each_ns(own: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the mean time by which rows would end earlier without each of the ranks in `own`."""
    last, columns = own.argmax(axis=0), np.arange(own.shape[1])
    largest = own[last, columns]
    own[last, columns] = -np.inf
    second = own.max(axis=0)
    own[last, columns] = largest
    return np.where(own == largest, largest - second, np.float32(0.0)).mean(axis=1)


def phase_of_excess(
    above_ns: npt.NDArray[np.float64],
    usual_ns: npt.NDArray[np.float64],
    *,
    is_host_bound: bool = False,
) -> tuple[str, float]:
    """Return the phase that explains most of an excess, and the excess in this phase.

    above_ns, usual_ns: excess and usual time in each of OWN_PARTS. If forward and backward are
    slower by similar ratios, the phase is "compute". is_host_bound: True if the device waits for
    its host in these phases. If the host is slow in both, its code between the phases is slower too.
    """
    largest = int(np.argmax(above_ns))
    forward, backward, host = (OWN_PARTS.index(part) for part in (*_COMPUTE, "host"))
    pair = above_ns[forward] + above_ns[backward]
    if largest in (forward, backward) and min(above_ns[forward], above_ns[backward]) > 0.15 * pair:
        shown = [forward, backward]
        if is_host_bound and usual_ns[host] > _MUCH_HOST_CODE * usual_ns.sum():
            shown.append(host)
        ratios = [above_ns[part] / max(1.0, usual_ns[part]) for part in shown]
        max_ratio = _MAX_RATIO_ON_HOSTS if is_host_bound else _MAX_RATIO
        if max(ratios) < max_ratio * min(ratios):
            return "compute", float(pair)
    return OWN_PARTS[largest], float(above_ns[largest])
