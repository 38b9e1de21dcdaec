"""Episodes: times in which a rank was slow, and what is to be said of them. Pure."""

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
# Where both grew alike: how many times as large as the other ratio one may be. The host of the rank that is last is a
# little slower in all phases.
_ALIKE, _ALIKE_ON_HOSTS = 2.25, 1.5
_MOST = 0.5  # of own time, that lies in parts in which the device waits for its host
_SAMPLE = 256  # of many ranks, from which the others' usual times are taken


@dataclasses.dataclass(frozen=True)
class Episode:
    """A time in which one rank was slow. Times in ns, means per step over the episode."""

    rank: int
    phase: str
    """An own part, "compute" where forward and backward grew alike, "cpu" where it lacked a CPU, or merged_windows.GAP
    where its device waited for its host."""
    judged_from_step: int
    """The first step of the rows that it is described by."""
    from_start: bool
    """Whether these are the first rows that were judged: no step before them is known to be another."""
    last_step: int
    until_step: int | None
    """The step from which on it was no longer slow; None while it is."""
    named_step: int
    """The step after which it was named. Unlike judged_from_step it is never corrected."""
    excess_ns: float
    phase_excess_ns: float
    cost_ns: float
    """How much sooner the step would have ended without it."""
    work_ns: float
    others_work_ns: float
    step_ns: float
    z_score: float
    """Standard errors, with clipped values."""
    slow_share: float
    """Share of the steps in which it was slow by at least half of its usual excess when slow."""
    slow_excess_ns: float
    """Median excess in those."""
    more_workload: float
    """How much more workload it had than the others, as a share; 0 if not known."""
    shared_cost_ns: float | None = None
    """How much sooner the step would have ended without all slow ranks that do the same work: of the newest time when
    there were any. None: it is not known."""
    by_host: bool = False
    """Whether its device waits for its host in what it is slow in: its host is slow, and hosts were compared."""
    by_windows: bool = False
    """Known from windows that the devices merged, and not from the rank's own rows, see merged_windows.py."""
    disputed: bool = False
    """Those windows would show it, and do not."""

    @property
    def since_step(self) -> int:
        """The first step in which the rank was slow, on every surface: 0 if it was slow from the start."""
        return 0 if self.from_start else self.judged_from_step

    @property
    def is_over(self) -> bool:
        """Whether the rank is no longer slow."""
        return self.until_step is not None

    @property
    def key(self) -> tuple[int, int]:
        """The same for this one, whatever becomes known of it later, also to a sidecar that was started again."""
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
    """The episode with what is measured over the rows `keys`.

    index, others: the rank's and the others' positions in `window`. series: the rank's excess in those rows; scale: its
    noise. Rows with a single stall are left out: they would hide what the rank does else.
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
        alike = _ALIKE_ON_HOSTS if _is_by_host(parts, its_host[0], _COMPUTE) else _ALIKE
        phase, part_ns = phase_of(above, usual_parts.mean(axis=0), alike)
        phase_excess_ns = part_ns * slow_share
        by_host = _is_by_host(parts, its_host[0], _COMPUTE if phase == "compute" else (phase,))
    return dataclasses.replace(
        episode,
        phase=phase,
        last_step=last_step,
        excess_ns=excess_ns,
        phase_excess_ns=phase_excess_ns,
        # The step ends with the slowest rank: how much sooner it would without this one, less what noise gives any.
        # Where it also lacks a CPU, the job waits for that too; but that is none of what makes it slower than others.
        cost_ns=min(_gain_ns(_own_ns(window, np.append(others, index), at)), max(0.0, excess_ns)),
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
    """How much sooner the step would have ended without the rank's excess in each of the rows `keys`.

    index, others: positions in `window`. Other than its cost, this is no larger where the rank was the last one by
    chance, for another reason.
    """
    own = _own_ns(window, np.append(others, index), keys % window.columns)
    return float(np.clip(own[-1] - own[:-1].max(axis=0), 0, np.maximum(excess_ns, 0)).mean())


def shared_cost_ns(
    window: SlidingWindow, together: npt.NDArray[np.int64], others: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]
) -> float:
    """How much sooner the step would have ended without several ranks at once, over the rows `keys`.

    Less what noise gives any as many. together, others: positions in `window`. Rows with a single stall are left out.
    """
    own = _own_ns(window, np.append(others, together), keys % window.columns)
    theirs, own = own[len(others) :].max(axis=0), own[: len(others)]
    excess = theirs - np.median(own, axis=0)
    usual_rows = without_stalls(excess, noise(excess[None])) == excess
    teams = [own[first : first + len(together)].max(axis=0) for first in range(0, len(others), len(together))]
    return _gain_ns(np.stack([*teams, theirs])[:, usual_rows])


def _own_ns(window: SlidingWindow, ranks: npt.NDArray[np.int64], at: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """[ranks, rows]: work and the time ready without a CPU, which the others wait for alike."""
    place = np.ix_(ranks, at)
    return window.own_ns[place] + np.nan_to_num(window.no_cpu_ns[place])


def _is_by_host(own_ns: npt.NDArray[np.float64], by_host: npt.NDArray[np.bool_], phases: Sequence[str]) -> bool:
    """Whether the device waits for its host in most of a rank's own time in these phases: of [rows, parts]."""
    places = [OWN_PARTS.index(phase) for phase in phases]
    by_host_ns = float(own_ns[:, places][by_host[:, places]].sum())
    return by_host_ns > _MOST * max(1.0, float(own_ns[:, places].sum()))


def _gain_ns(own: npt.NDArray[np.float32]) -> float:
    """What is gained without the last row, less what is gained without any: [ranks or teams, rows]."""
    last, columns = own.argmax(axis=0), np.arange(own.shape[1])
    largest = own[last, columns]
    own[last, columns] = -np.inf
    second = own.max(axis=0)
    own[last, columns] = largest
    gains = np.where(own == largest, largest - second, 0.0).mean(axis=1)
    return max(0.0, float(gains[-1] - np.median(gains[:-1])))


def phase_of(
    above_ns: npt.NDArray[np.float64], usual_ns: npt.NDArray[np.float64], alike: float = _ALIKE
) -> tuple[str, float]:
    """The phase that explains most of an excess, and how much: from the excess and the usual time of each own part.

    Where forward and backward are both slower, by a similar ratio, the rank computes slowly: "compute". alike: how many
    times as large one ratio may be.
    """
    largest = int(np.argmax(above_ns))
    forward, backward = (OWN_PARTS.index(part) for part in _COMPUTE)
    pair = above_ns[forward] + above_ns[backward]
    if largest in (forward, backward) and min(above_ns[forward], above_ns[backward]) > 0.15 * pair:
        ratios = [above_ns[part] / max(1.0, usual_ns[part]) for part in (forward, backward)]
        if max(ratios) < alike * min(ratios):
            return "compute", float(pair)
    return OWN_PARTS[largest], float(above_ns[largest])
