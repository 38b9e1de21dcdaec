"""The statistics of the judgement: excess over other ranks, its noise, and the strongest interval. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchlens_perf.analysis.statistics.robust import TO_SIGMA, median

if TYPE_CHECKING:
    import numpy.typing as npt

_INTERVALS = 256  # at most, of a rank at a time
CLIP = 4.0  # standard deviations that one row may count
FALSE_ALARMS = 1e-4  # a judgement of a clean job, by the bound that threshold() takes
_SAMPLE = 1024  # ranks from which the noise is taken
_FEW_RANKS = 16  # so many are compared with the others alone; of more, one does not move the median
_NEIGHBOURS = (1, 4, 8)  # rows, over which means are taken for the noise


def excess_over_others(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.floating[Any]]:
    """[ranks, rows]: each value above the median of the other ranks' in its row."""
    ranks = len(values)
    if ranks > _FEW_RANKS:
        over_all: npt.NDArray[np.floating[Any]] = values - median(values, 0)
        return over_all
    if ranks < 2:
        return np.full(values.shape, np.nan, values.dtype)
    # What is at position i among the others is at i among all, or at i + 1 if the rank itself comes before it.
    order = values.argsort(axis=0, kind="stable")
    ascending, position = np.take_along_axis(values, order, 0), order.argsort(axis=0)
    lower, upper = (ranks - 2) // 2, (ranks - 1) // 2
    below = np.where(position > lower, ascending[lower], ascending[lower + 1])
    above = np.where(position > upper, ascending[upper], ascending[min(upper + 1, ranks - 1)])
    excess: npt.NDArray[np.floating[Any]] = values - (below + above) / 2
    return excess


def relative_excess(work: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[ranks, columns] of ranks that do the same: each value above the median of the others in its column, as a share
    of that; NaN where the rank has none there, or no other rank."""
    relative = np.full(work.shape, np.nan)
    for column, values in enumerate(work.T):
        present = np.flatnonzero(np.isfinite(values))
        if len(present) > 1:
            above = excess_over_others(values[present, None])[:, 0]
            others = values[present] - above
            known = others > 0
            relative[present[known], column] = above[known] / others[known]
    return relative


def noise(excess: npt.NDArray[np.floating[Any]]) -> float:
    """Standard deviation of the excess from row to row, as it counts in a mean over many rows: the middle rank's.

    From differences of neighbours, which a lasting excess does not move; and of means over four and eight rows, which
    vary more where neighbours are alike; of few such means, that may be more than is seen. Medians over rows, and means
    of clipped values: single stalls do not count. Not each rank's own, which an excess that comes and goes would raise.
    """
    if len(excess) > _SAMPLE:
        excess = excess[:: len(excess) // _SAMPLE]
    largest = 1.0
    for length in _NEIGHBOURS:
        count = excess.shape[1] // length
        if count >= 3:
            means = excess[:, : count * length].reshape(len(excess), count, length).mean(axis=2)
            steps = np.abs(np.diff(means, axis=1)) / np.sqrt(2)
            by_rank = np.sort(median(steps, 1))
            sigma = TO_SIGMA * float(by_rank[(len(by_rank) - 1) // 2]) * float(np.sqrt(length))
            largest = max(largest, sigma if length == 1 else sigma * (1 + 1 / (count - 1)))
        if length == 1:
            middle = median(excess, 1)[:, None]
            excess = np.clip(excess, middle - CLIP * largest, middle + CLIP * largest)
    return largest


class Interval(NamedTuple):
    """For each rank, the interval up to now over which its mean is the most standard errors above a level."""

    start: npt.NDArray[np.int64]
    z_score: npt.NDArray[np.floating[Any]]
    """Those standard errors."""


def strongest_interval(
    deviations: npt.NDArray[np.floating[Any]], min_rows: int, level: float | np.floating[Any] = 0.0
) -> Interval:
    """deviations: [ranks, rows], in standard deviations, as is the level."""
    ranks, rows = deviations.shape
    if rows < min_rows:
        return Interval(np.zeros(ranks, np.int64), np.full(ranks, -np.inf))
    above = np.clip(deviations - deviations.dtype.type(level), -CLIP, CLIP)
    sums = np.cumsum(above[:, ::-1], axis=1)[:, min_rows - 1 :]
    strengths = sums / np.sqrt(np.arange(min_rows, rows + 1)).astype(
        sums.dtype
    )  # of many ranks, no larger than need be
    best = strengths.argmax(axis=1)
    return Interval(rows - min_rows - best, strengths[np.arange(ranks), best])


def change_point(series: npt.NDArray[np.floating[Any]], mean: float) -> int:
    """The row from which on the series' mean is rather `mean` than zero: the most likely one for normal values.

    Hinkley, Biometrika 57, 1970. Values are clipped at twice the mean around it.
    """
    gains = np.clip(series, -mean, 3 * mean) - mean / 2
    return len(series) - 1 - int(np.cumsum(gains[::-1]).argmax())


def over_since(slow: npt.NDArray[np.bool_], usual_share: float, min_rows: int) -> int | None:
    """From which row on slow rows are so rare that the slowness is over; None if it is not.

    A likelihood ratio test of a fifth of the usual share against the usual share of slow rows, over the rows up to now.
    """
    usual = min(max(usual_share, 0.05), 0.95)
    rare = usual / 5
    evidence = np.where(slow, np.log(rare / usual), np.log((1 - rare) / (1 - usual)))
    sums = np.cumsum(evidence[::-1])[min_rows - 1 :]
    if not len(sums) or sums.max() < -np.log(FALSE_ALARMS):
        return None
    return len(slow) - min_rows - int(sums.argmax())


def without_stalls(series: npt.NDArray[np.floating[Any]], scale: float) -> npt.NDArray[np.floating[Any]]:
    """The series with its single stalls cut down to the largest of the other values: at most one row in 16, far above.

    scale: its noise. A stall of seconds, by storage or a network, would else be all that is seen of a rank.
    """
    rare = max(1, len(series) // 16)
    if len(series) <= rare:
        return series
    usual = np.partition(series, -rare - 1)[-rare - 1]
    return np.where(series > usual + 2 * CLIP * scale, usual, series)


def threshold(ranks: int) -> float:
    """Standard errors that chance does not give: sqrt(2 ln(n / p)) bounds n = ranks x intervals normal values."""
    return float(np.sqrt(2 * np.log(ranks * _INTERVALS / FALSE_ALARMS)))


def self_normalized_threshold(ranks: int) -> float:
    """Standard errors by an interval's own spread: the same bound, for one interval of each rank and one chance in 200.

    Less than threshold(): it is asked of intervals that threshold() has let pass.
    """
    return float(np.sqrt(2 * np.log(200 * ranks)))


def is_persistent(
    series: npt.NDArray[np.floating[Any]], scale: float, min_errors: float, *, strict: bool = False
) -> bool:
    """Whether an interval's excess is there in all its quarters, but for one; strict: in all, and evenly.

    And whether it is clear by the interval's own spread: a few long stalls are no lasting excess. scale: its noise;
    min_errors: standard errors of the interval's own.
    """
    mean = float(series.mean())
    clipped = np.clip(series, -2 * CLIP * scale, 2 * CLIP * scale)
    if float(clipped.mean()) * np.sqrt(len(series)) < min_errors * float(clipped.std(ddof=1)):
        return False
    quarters = np.array([part.mean() for part in np.array_split(series, 4)])
    if strict:
        return bool((quarters > mean / 2).all())
    return bool((quarters > 0).all() and (quarters > 0.3 * mean).sum() >= 3)


def without_workload(
    excess: npt.NDArray[np.floating[Any]], workload: npt.NDArray[np.floating[Any]], min_rows: int
) -> npt.NDArray[np.floating[Any]]:
    """The excess without what a rank's larger workload explains: [ranks, rows], as are both arguments.

    One straight line for all ranks and rows; only where that makes the excess smaller. And only for workload that
    varies: the excess of a rank that has had clearly more of it for `min_rows` rows or longer, up to now, stays.
    Rows in which a rank's workload is not known (NaN) stay as they are.
    """
    known = np.isfinite(workload).all(axis=0)
    if known.sum() < max(min_rows // 4, known.size / 2):
        return excess
    more = np.zeros(workload.shape)
    more[:, known] = excess_over_others(workload[:, known].astype(np.float64))
    variance = float((more[:, known] ** 2).mean())
    if variance <= 0:
        return excess
    clipped = np.clip(excess, *np.quantile(excess, (0.01, 0.99)))
    slope = float((more * clipped)[:, known].mean()) / variance
    left = excess - slope * more
    if slope <= 0 or np.median(np.abs(left[:, known])) >= 0.95 * np.median(np.abs(excess[:, known])):
        return excess
    scale = noise(more)
    lasting = strongest_interval(more / scale, min_rows)
    for rank in np.flatnonzero(lasting.z_score > threshold(len(more))).tolist():
        since = slice(int(lasting.start[rank]), None)
        if is_persistent(more[rank, since], scale, self_normalized_threshold(len(more)), strict=True):
            left[rank, since] = excess[rank, since]
    return left
