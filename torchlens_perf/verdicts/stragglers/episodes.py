"""Episodes: ranges of steps in which a rank was slow, and their measurements. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.stragglers.excess import CLIP, noise, without_stalls

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from torchlens_perf.verdicts.stragglers.window import SlidingWindow

_COMPUTE = ("forward", "backward")
# Forward and backward count as equally slow if one relative excess is less than this many times the
# other. The limit is lower for host times, as the host of the last rank is a little slower in all
# phases.
_MAX_RATIO, _MAX_RATIO_ON_HOSTS = 2.25, 1.5
# An episode is the host's if the device waits for its host in more than this share of own time.
_MOST = 0.5
# The other ranks' usual times are computed from at most about this many ranks.
_SAMPLE = 256


@dataclasses.dataclass(frozen=True)
class Episode:
    """A range of steps in which one rank was slow.

    Times in ns, as means per step over the episode.
    """

    rank: int
    phase: str
    """The slow part: an own part, "compute" if forward and backward are slower by similar ratios,
    "cpu" if the rank
    lacked a CPU, or merged_windows.GAP if its device waited for its host."""
    judged_from_step: int
    """The first step of the rows that the measurements are from."""
    from_start: bool
    """True if these are the first judged rows, so the rank may never have been faster."""
    last_step: int
    until_step: int | None
    """The first step in which the rank was no longer slow; None while it is slow."""
    named_step: int
    """The step after which the rank was named. Unlike judged_from_step it is never corrected."""
    excess_ns: float
    phase_excess_ns: float
    cost_ns: float
    """How much sooner the step would have ended without the excess."""
    work_ns: float
    others_work_ns: float
    step_ns: float
    z_score: float
    """Standard errors of the mean excess above zero, with clipped values."""
    slow_share: float
    """Share of the steps in which the excess was at least half of its usual value in slow steps."""
    slow_excess_ns: float
    """Median excess in these steps."""
    more_workload: float
    """How much more workload the rank had than the others, as a share; 0 if not known."""
    shared_cost_ns: float | None = None
    """How much sooner the step would have ended without all slow ranks that do the same work, when
    there were several last; None if not known."""
    by_host: bool = False
    """True if the device waits for its host in the slow phase: the host is slow."""
    by_windows: bool = False
    """True if it is known from windows that devices merged, not from the rank's own rows, see
    merged_windows.py."""
    disputed: bool = False
    """True if those windows should show it and do not."""

    @property
    def since_step(self) -> int:
        """The first step in which the rank was slow, on every screen: 0 if slow from the start."""
        return 0 if self.from_start else self.judged_from_step

    @property
    def is_over(self) -> bool:
        """True if the rank is no longer slow."""
        return self.until_step is not None

    @property
    def key(self) -> tuple[int, int]:
        """A key that never changes, also after a restart of the sidecar."""
        return self.rank, self.named_step


def described(
    episode: Episode,
    window: SlidingWindow,
    index: int,
    others: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
    series: npt.NDArray[np.float64],
    scale: float,
) -> Episode:
    """Return the episode with its measurements over the rows `keys`.

    index, others: the rank's and the others' positions in `window`. series: the rank's excess in
    those rows; scale: its noise. Rows with a single stall are left out, as they would hide what the
    rank usually does.
    """
    last_step = int(keys[-1] + 1) * window.width - 1
    usual_rows = without_stalls(series, scale) == series
    keys, series = keys[usual_rows], series[usual_rows]
    at = keys % window.columns
    excess_ns = float(series.mean())
    high = series[series > excess_ns / 2]
    usual = float(np.median(high)) if len(high) else excess_ns
    slow = series > usual / 2
    slow_share = float(slow.mean())
    sample = others[:: max(1, len(others) // _SAMPLE)]
    its_parts, its_host = window.own_parts(np.ix_(np.array([index]), at))
    parts = its_parts[0].astype(np.float64)
    usual_parts = np.median(window.own_parts(np.ix_(sample, at))[0], axis=0).astype(np.float64)
    load = window.workload[np.ix_(np.append(sample, index), at)].astype(np.float64)
    more_workload = episode.more_workload
    if np.isfinite(load).all() and (typical := float(np.median(load[:-1]))) > 0:
        more_workload = float(load[-1].mean()) / typical - 1
    phase, phase_excess_ns, by_host = episode.phase, excess_ns, False
    if phase != "cpu":
        above = (parts - usual_parts)[slow].mean(axis=0) if slow.any() else np.zeros(len(OWN_PARTS))
        max_ratio = _MAX_RATIO_ON_HOSTS if _is_by_host(parts, its_host[0], _COMPUTE) else _MAX_RATIO
        phase, part_ns = phase_of(above, usual_parts.mean(axis=0), max_ratio)
        phase_excess_ns = part_ns * slow_share
        by_host = _is_by_host(parts, its_host[0], _COMPUTE if phase == "compute" else (phase,))
    return dataclasses.replace(
        episode,
        phase=phase,
        last_step=last_step,
        excess_ns=excess_ns,
        phase_excess_ns=phase_excess_ns,
        # The step ends with the slowest rank. The cost is how much sooner it would end without this
        # rank, minus the same for a healthy rank, which is noise. The job may also wait for the
        # rank's lack of a CPU, but that is not part of its excess, so the excess limits the cost.
        cost_ns=min(
            _gain_by_row_ns(_own_ns(window, np.append(others, index), at)), max(0.0, excess_ns)
        ),
        work_ns=float(parts.sum(axis=1).mean()),
        others_work_ns=float(np.median(window.own_ns[np.ix_(sample, at)], axis=0).mean()),
        step_ns=float(np.median(window.duration_ns[index, at])),
        z_score=float(np.clip(series / scale, -CLIP, CLIP).sum() / np.sqrt(len(series))),
        slow_share=slow_share,
        slow_excess_ns=float(np.median(series[slow])) if slow.any() else excess_ns,
        more_workload=more_workload,
        by_host=by_host,
    )


def would_gain_ns(
    window: SlidingWindow,
    index: int,
    others: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
    excess_ns: npt.NDArray[np.floating[Any]],
) -> float:
    """Return how much sooner the step would have ended without the rank's excess in each of the
    rows `keys`.

    index, others: positions in `window`. Unlike the cost, the gain of each row is limited by the
    rank's excess in it. A row in which the rank was last for another reason does not count.
    """
    own = _own_ns(window, np.append(others, index), keys % window.columns)
    return float(np.clip(own[-1] - own[:-1].max(axis=0), 0, np.maximum(excess_ns, 0)).mean())


def shared_cost_ns(
    window: SlidingWindow,
    together: npt.NDArray[np.int64],
    others: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
) -> float:
    """Return how much sooner the step would have ended without several ranks, over the rows `keys`.

    The same gain for as many healthy ranks, which is noise, is subtracted. together, others:
    positions in `window`. Rows with a single stall are left out.
    """
    own = _own_ns(window, np.append(others, together), keys % window.columns)
    theirs, own = own[len(others) :].max(axis=0), own[: len(others)]
    excess = theirs - np.median(own, axis=0)
    usual_rows = without_stalls(excess, noise(excess[None])) == excess
    teams = [
        own[first : first + len(together)].max(axis=0)
        for first in range(0, len(others), len(together))
    ]
    return _gain_by_row_ns(np.stack([*teams, theirs])[:, usual_rows])


def _own_ns(
    window: SlidingWindow, ranks: npt.NDArray[np.int64], at: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return work plus ready time, as other ranks wait for both: [ranks, rows]."""
    place = np.ix_(ranks, at)
    return window.own_ns[place] + np.nan_to_num(window.no_cpu_ns[place])


def _is_by_host(
    own_ns: npt.NDArray[np.float64], by_host: npt.NDArray[np.bool_], phases: Sequence[str]
) -> bool:
    """Return True if the device waits for its host during most of these phases' self time.

    own_ns, by_host: [rows, parts].
    """
    places = [OWN_PARTS.index(phase) for phase in phases]
    by_host_ns = float(own_ns[:, places][by_host[:, places]].sum())
    return by_host_ns > _MOST * max(1.0, float(own_ns[:, places].sum()))


def _gain_by_row_ns(own: npt.NDArray[np.float32]) -> float:
    """Return how much earlier the rows end without the last entry, minus the median of the same for
    other entries.

    own: [ranks or teams, rows].
    """
    last, columns = own.argmax(axis=0), np.arange(own.shape[1])
    largest = own[last, columns]
    own[last, columns] = -np.inf
    second = own.max(axis=0)
    own[last, columns] = largest
    gains = np.where(own == largest, largest - second, 0.0).mean(axis=1)
    return max(0.0, float(gains[-1] - np.median(gains[:-1])))


def phase_of(
    above_ns: npt.NDArray[np.float64],
    usual_ns: npt.NDArray[np.float64],
    max_ratio: float = _MAX_RATIO,
) -> tuple[str, float]:
    """Return the phase that explains most of an excess, and its part of the excess.

    above_ns, usual_ns: excess and usual time of each own part. If forward and backward are slower
    by similar ratios, the phase is "compute". max_ratio: limit of the larger ratio divided by the
    smaller one.
    """
    largest = int(np.argmax(above_ns))
    forward, backward = (OWN_PARTS.index(part) for part in _COMPUTE)
    pair = above_ns[forward] + above_ns[backward]
    if largest in (forward, backward) and min(above_ns[forward], above_ns[backward]) > 0.15 * pair:
        ratios = [above_ns[part] / max(1.0, usual_ns[part]) for part in (forward, backward)]
        if max(ratios) < max_ratio * min(ratios):
            return "compute", float(pair)
    return OWN_PARTS[largest], float(above_ns[largest])
