"""Which rank is slow, and in which phase. Pure: works on window medians, knows no file and no clock.

Step times equalise in synchronous training, so they name nobody. Compared is each rank's own time: the step minus the
time blocked in collectives. A rank is named if its own time exceeds the others' in most windows by more than both a
share of the step and the noise between windows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.rank_statistics import Windows
from torchlens_perf.records import OWN_PARTS, PARTS

if TYPE_CHECKING:
    import numpy.typing as npt

LEAST_SHARE = 0.02  # of the step: what is not worth a person's time
LEAST_BLAME = 0.6  # share of windows in which the rank must be the slowest by half its usual excess
NOISE_FACTOR = 4.0  # standard errors
LEAST_WINDOWS = 3
_OWN = [PARTS.index(part) for part in OWN_PARTS]


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A rank whose own time exceeds the others'. Times in ns, per step."""

    rank: int
    phase: str
    excess_ns: float
    """Median over windows since `since_step`: own time above the next slowest rank's."""
    phase_excess_ns: float
    """How much of that the phase explains: the phase above the other ranks' median."""
    own_ns: float
    others_own_ns: float
    step_ns: float
    since_step: int
    blame: float
    windows: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of judging: a straggler or none, and what would have been seen."""

    straggler: Straggler | None
    windows: int
    step_ns: float
    detectable_ns: float
    """The smallest excess that would have been named."""


def align(ranks: Mapping[int, Windows]) -> tuple[list[int], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ranks, first steps and own parts of the windows that all ranks have: shape [ranks, windows, len(PARTS)].

    Ranks whose windows are narrower than the widest are averaged up to it.
    """
    order = sorted(ranks)
    width = max(windows.width for windows in ranks.values())
    tables = []
    for rank in order:
        windows = ranks[rank]
        keys = windows.first_step // width * width
        table = {}
        for first in np.unique(keys).tolist():
            rows = keys == first
            table[first] = np.concatenate(([windows.duration_ns[rows].mean()], windows.parts_ns[rows].mean(axis=0)))
        tables.append(table)
    common = sorted(set.intersection(*(set(table) for table in tables)))
    values = np.array([[table[first] for first in common] for table in tables], np.float64)
    return order, np.array(common, np.int64), values.reshape(len(order), len(common), 1 + len(PARTS))


def compare(ranks: Mapping[int, Windows]) -> Comparison:
    """Judges ranks that do the same work in the same step. Needs two ranks and LEAST_WINDOWS common windows."""
    if len(ranks) < 2:
        return Comparison(None, 0, 0.0, float("inf"))
    order, first_steps, values = align(ranks)
    if len(first_steps) > LEAST_WINDOWS:
        first_steps, values = first_steps[1:], values[:, 1:]  # the first window holds warm-up
    if len(first_steps) < LEAST_WINDOWS:
        return Comparison(
            None, len(first_steps), float(np.median(values[:, :, 0])) if values.size else 0.0, float("inf")
        )
    parts = values[:, :, 1:]
    own = parts[:, :, _OWN].sum(axis=2)
    step_ns = float(np.median(values[:, :, 0]))
    slowest = int(np.argmax(np.median(own[:, len(first_steps) // 2 :], axis=1)))
    excess = own[slowest] - np.delete(own, slowest, axis=0).max(axis=0)
    begin = _since(excess)
    detectable_ns = max(LEAST_SHARE * step_ns, NOISE_FACTOR * _standard_error(excess[begin:]))
    usual = float(np.median(excess[begin:]))
    blame = float(np.mean(excess[begin:] > usual / 2)) if usual > 0 else 0.0
    if usual < detectable_ns or blame < LEAST_BLAME:
        return Comparison(None, len(first_steps), step_ns, detectable_ns)
    others = np.delete(parts, slowest, axis=0)
    above = np.median(parts[slowest, begin:] - np.median(others[:, begin:], axis=0), axis=0)[_OWN]
    phase = int(np.argmax(above))
    found = Straggler(
        rank=order[slowest],
        phase=OWN_PARTS[phase],
        excess_ns=usual,
        phase_excess_ns=float(above[phase]),
        own_ns=float(np.median(own[slowest, begin:])),
        others_own_ns=float(np.median(np.delete(own, slowest, axis=0)[:, begin:])),
        step_ns=float(np.median(values[:, begin:, 0])),
        since_step=0 if begin == 0 else int(first_steps[begin]),
        blame=blame,
        windows=len(excess) - begin,
    )
    return Comparison(found, len(first_steps), step_ns, detectable_ns)


def _since(excess: npt.NDArray[np.float64]) -> int:
    """The window from which on the excess lasts; 0 if it does not clearly rise.

    The change-point that leaves the least absolute deviation from the medians before and after it.
    """
    count = len(excess)
    splits = range(LEAST_WINDOWS, count - LEAST_WINDOWS + 1)
    if not splits:
        return 0
    best = min(splits, key=lambda split: _deviation(excess[:split]) + _deviation(excess[split:]))
    before, after = float(np.median(excess[:best])), float(np.median(excess[best:]))
    return best if after > 0 and before < after / 2 else 0


def _deviation(values: npt.NDArray[np.float64]) -> float:
    return float(np.abs(values - np.median(values)).sum())


def _standard_error(values: npt.NDArray[np.float64]) -> float:
    """Of the median, from the median absolute deviation: 1.4826 MAD estimates sigma, 1.2533 sigma/sqrt(n) the error."""
    deviation = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return 1.2533 * deviation / float(np.sqrt(len(values)))
