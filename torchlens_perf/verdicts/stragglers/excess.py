"""Statistics of the straggler detector. Excess is the additional time of a rank compared with other
ranks. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.robust import TO_SIGMA, fast_median

# The largest number of intervals that are tested for each rank at one time.
_MAX_INTERVALS = 256
# Rows are clipped at this many standard deviations, so a single row cannot make a rank slow.
CLIP = 4.0
# The probability that a test of all ranks of a healthy job names a rank, see detection_threshold().
FALSE_ALARMS = 1e-4
# Above this number of ranks, the noise is estimated from a sample of ranks.
_SAMPLE = 1024
# Up to this number of ranks, each rank is compared with the median of the other ranks. With more
# ranks, the rank's own value hardly changes the median, so the median of all ranks is used.
_FEW_RANKS = 16
# The noise is estimated from means over these numbers of neighbouring rows.
_NEIGHBOURS = (1, 4, 8)


def excess_over_others(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.floating[Any]]:
    """Return each value minus the median of the other ranks' values in its row: [ranks, rows]."""
    ranks = len(values)
    if ranks > _FEW_RANKS:
        return values - fast_median(values, 0)
    if ranks < 2:
        return np.full(values.shape, np.nan, values.dtype)
    # Element i of the other ranks' sorted values is element i of all sorted values. If the rank's
    # own value is sorted before that element, use element i + 1 instead.
    order = values.argsort(axis=0, kind="stable")
    ascending, position = np.take_along_axis(values, order, 0), order.argsort(axis=0)
    lower, upper = (ranks - 2) // 2, (ranks - 1) // 2
    below = np.where(position > lower, ascending[lower], ascending[lower + 1])
    above = np.where(position > upper, ascending[upper], ascending[min(upper + 1, ranks - 1)])
    return values - (below + above) / 2


def relative_excess(work: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return each value's excess over the median of the other ranks, as a share of this median.

    work: [ranks, columns], for ranks that do the same work. The result is NaN for missing values,
    and in columns with a single rank.
    """
    relative = np.full(work.shape, np.nan)
    for column, values in enumerate(work.T):
        present = np.flatnonzero(np.isfinite(values))
        if len(present) > 1:
            above = excess_over_others(values[present, None])[:, 0]
            others = values[present] - above
            known = others > 0
            relative[present[known], column] = above[known] / others[known]
    return relative


def estimate_noise(excess: npt.NDArray[np.floating[Any]]) -> float:
    """Return the standard deviation of a rank's excess from row to row.

    The noise is estimated from differences of neighbouring rows, which do not depend on a constant
    excess. Neighbouring rows may be correlated, so differences of means over four and eight rows
    are used as well. If there are few means, their estimate is increased. Medians and clipped
    values make single stalls irrelevant. The result is that of the median rank, because an
    intermittent excess increases the noise of the slow rank.
    """
    if len(excess) > _SAMPLE:
        excess = excess[:: len(excess) // _SAMPLE]
    largest = 1.0
    for length in _NEIGHBOURS:
        count = excess.shape[1] // length
        if count >= 3:
            means = excess[:, : count * length].reshape(len(excess), count, length).mean(axis=2)
            steps = np.abs(np.diff(means, axis=1)) / np.sqrt(2)
            by_rank = np.sort(fast_median(steps, 1))
            sigma = TO_SIGMA * float(by_rank[(len(by_rank) - 1) // 2]) * float(np.sqrt(length))
            largest = max(largest, sigma if length == 1 else sigma * (1 + 1 / (count - 1)))
        if length == 1:
            middle = fast_median(excess, 1)[:, None]
            excess = np.clip(excess, middle - CLIP * largest, middle + CLIP * largest)
    return largest


class StrongestIntervals(NamedTuple):
    """For each rank, the interval up to the newest row that has the most significant mean."""

    start: npt.NDArray[np.int64]
    """First row of the interval."""
    z_score: npt.NDArray[np.floating[Any]]
    """Number of standard errors by which the interval's mean exceeds a level."""


def find_strongest_intervals(
    deviations: npt.NDArray[np.floating[Any]], min_rows: int, level: float | np.floating[Any] = 0.0
) -> StrongestIntervals:
    """Return, for each rank, the interval whose mean is the most standard errors above `level`.

    deviations: [ranks, rows]. Deviations and level are in standard deviations.
    """
    ranks, rows = deviations.shape
    if rows < min_rows:
        return StrongestIntervals(np.zeros(ranks, np.int64), np.full(ranks, -np.inf))
    above = np.clip(deviations - deviations.dtype.type(level), -CLIP, CLIP)
    sums = np.cumsum(above[:, ::-1], axis=1)[:, min_rows - 1 :]
    # The cast keeps values at 32 bits, which halves the memory for many ranks.
    strengths = sums / np.sqrt(np.arange(min_rows, rows + 1)).astype(sums.dtype)
    best = strengths.argmax(axis=1)
    return StrongestIntervals(rows - min_rows - best, strengths[np.arange(ranks), best])


def find_change_point(series: npt.NDArray[np.floating[Any]], mean: float) -> int:
    """Return the row at which the mean of the series most likely changed from zero to `mean`.

    The result is the maximum likelihood estimate for normally distributed values (Hinkley,
    Biometrika 57, 1970). Values are clipped to the range from -mean to 3 times the mean.
    """
    gains = np.clip(series, -mean, 3 * mean) - mean / 2
    return len(series) - 1 - int(np.cumsum(gains[::-1]).argmax())


def find_recovery(slow: npt.NDArray[np.bool_], usual_share: float, min_rows: int) -> int | None:
    """Return the row from which on slow rows are so rare that the rank has recovered; else None.

    A likelihood ratio test shows whether the share of slow rows is a fifth of the usual share.
    """
    usual = min(max(usual_share, 0.05), 0.95)
    rare = usual / 5
    evidence = np.where(slow, np.log(rare / usual), np.log((1 - rare) / (1 - usual)))
    sums = np.cumsum(evidence[::-1])[min_rows - 1 :]
    if not len(sums) or sums.max() < -np.log(FALSE_ALARMS):
        return None
    return len(slow) - min_rows - int(sums.argmax())


def limit_stalls(
    series: npt.NDArray[np.floating[Any]], scale: float
) -> npt.NDArray[np.floating[Any]]:
    """Return the series with single stalls reduced to the largest other value.

    A stall of seconds, caused by storage or a network, would otherwise dominate all means. At most
    one row in 16 counts as a stall, and only if it is far above all other rows. scale: noise of the
    series.
    """
    rare = max(1, len(series) // 16)
    if len(series) <= rare:
        return series
    usual = np.partition(series, -rare - 1)[-rare - 1]
    return np.where(series > usual + 2 * CLIP * scale, usual, series)


def detection_threshold(ranks: int) -> float:
    """Return the number of standard errors above which an excess is not due to chance.

    The largest of n normally distributed values exceeds sqrt(2 ln(n / p)) with a probability of at
    most p. Here, n is the number of ranks times the number of intervals, and p is FALSE_ALARMS.
    """
    return float(np.sqrt(2 * np.log(ranks * _MAX_INTERVALS / FALSE_ALARMS)))


def persistence_threshold(ranks: int) -> float:
    """Return the threshold for standard errors that are computed from the interval's own spread.

    This threshold has the formula of detection_threshold(), for one interval of each rank and a
    probability of 1 in 200. This threshold only applies to intervals above detection_threshold().
    """
    return float(np.sqrt(2 * np.log(200 * ranks)))


def is_persistent(
    series: npt.NDArray[np.floating[Any]], scale: float, min_errors: float, *, strict: bool = False
) -> bool:
    """Return True if the excess is present in at least three quarters of an interval.

    strict: the excess must be present in all four quarters, and similar in all of them. The excess
    must also be significant compared with the interval's own spread, because a few long stalls are
    not a persistent excess. scale: noise of the series. min_errors: the lowest number of standard
    errors that are computed from this spread.
    """
    mean = float(series.mean())
    clipped = np.clip(series, -2 * CLIP * scale, 2 * CLIP * scale)
    if float(clipped.mean()) * np.sqrt(len(series)) < min_errors * float(clipped.std(ddof=1)):
        return False
    quarters = np.array([part.mean() for part in np.array_split(series, 4)])
    if strict:
        return bool((quarters > mean / 2).all())
    return bool((quarters > 0).all() and (quarters > 0.3 * mean).sum() >= 3)


def subtract_workload_effect(
    excess: npt.NDArray[np.floating[Any]], workload: npt.NDArray[np.floating[Any]], min_rows: int
) -> npt.NDArray[np.floating[Any]]:
    """Return the excess without the part that a larger workload explains.

    The arguments and the result have the shape [ranks, rows]. The explained part is a linear fit
    over all ranks and rows. The explained part is subtracted only if this reduces the excess. If a
    rank has had clearly more workload in at least the newest `min_rows` rows, its excess is kept,
    because the larger workload is reported. Rows with an unknown workload (NaN) are not changed.
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
    if slope <= 0 or np.median(np.abs(left[:, known])) >= 0.95 * np.median(
        np.abs(excess[:, known])
    ):
        return excess
    scale = estimate_noise(more)
    lasting = find_strongest_intervals(more / scale, min_rows)
    for rank in np.flatnonzero(lasting.z_score > detection_threshold(len(more))).tolist():
        since = slice(int(lasting.start[rank]), None)
        if is_persistent(more[rank, since], scale, persistence_threshold(len(more)), strict=True):
            left[rank, since] = excess[rank, since]
    return left
