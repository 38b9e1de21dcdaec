"""Statistics of the straggler detector: excess over other ranks, its noise, and the strongest
interval. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchlens_perf.analysis.statistics.robust import TO_SIGMA, fast_median

if TYPE_CHECKING:
    import numpy.typing as npt

# The most intervals that one judgement tests for each rank.
_MAX_INTERVALS = 256
# Rows are clipped at this many standard deviations, so that no single row decides.
CLIP = 4.0
# False alarms per judgement of a healthy job, by the bound in threshold().
FALSE_ALARMS = 1e-4
# Above this number of ranks, the noise is estimated from a sample of them.
_SAMPLE = 1024
# Up to this number of ranks, a rank is compared with the median of the others. With more, its own
# value hardly changes the median, so all ranks are compared with the median of all.
_FEW_RANKS = 16
# The noise is estimated from means over these numbers of neighbouring rows.
_NEIGHBOURS = (1, 4, 8)


def excess_over_others(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.floating[Any]]:
    """Return each value minus the median of the other ranks' values in its row: [ranks, rows]."""
    ranks = len(values)
    if ranks > _FEW_RANKS:
        over_all: npt.NDArray[np.floating[Any]] = values - fast_median(values, 0)
        return over_all
    if ranks < 2:
        return np.full(values.shape, np.nan, values.dtype)
    # Element i of the others' sorted values is element i of all sorted values, or i + 1 if the rank
    # comes before it.
    order = values.argsort(axis=0, kind="stable")
    ascending, position = np.take_along_axis(values, order, 0), order.argsort(axis=0)
    lower, upper = (ranks - 2) // 2, (ranks - 1) // 2
    below = np.where(position > lower, ascending[lower], ascending[lower + 1])
    above = np.where(position > upper, ascending[upper], ascending[min(upper + 1, ranks - 1)])
    excess: npt.NDArray[np.floating[Any]] = values - (below + above) / 2
    return excess


def relative_excess(work: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the excess of each value over the median of the others in its column, as a share.

    work: [ranks, columns], of ranks that do the same work. Missing values, and columns of a single
    rank, give NaN.
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


def noise(excess: npt.NDArray[np.floating[Any]]) -> float:
    """Return the standard deviation of the excess from row to row, for use in means over many rows.

    It is estimated from differences of neighbouring rows, which a lasting excess does not change.
    Differences of means over four and eight rows are used as well, as neighbouring rows may be
    correlated. They are raised where there are few of them. Medians over rows and clipped values
    make single stalls irrelevant. The result is that of the median rank, because an intermittent
    excess raises the rank's own noise.
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


class Interval(NamedTuple):
    """For each rank, the interval up to the newest row whose mean is the most standard errors above
    a level."""

    start: npt.NDArray[np.int64]
    z_score: npt.NDArray[np.floating[Any]]
    """Standard errors above the level."""


def strongest_interval(
    deviations: npt.NDArray[np.floating[Any]], min_rows: int, level: float | np.floating[Any] = 0.0
) -> Interval:
    """Return the strongest interval of each rank.

    deviations: [ranks, rows], in standard deviations, as is `level`.
    """
    ranks, rows = deviations.shape
    if rows < min_rows:
        return Interval(np.zeros(ranks, np.int64), np.full(ranks, -np.inf))
    above = np.clip(deviations - deviations.dtype.type(level), -CLIP, CLIP)
    sums = np.cumsum(above[:, ::-1], axis=1)[:, min_rows - 1 :]
    # The cast keeps 32 bits, which halves the memory for many ranks.
    strengths = sums / np.sqrt(np.arange(min_rows, rows + 1)).astype(sums.dtype)
    best = strengths.argmax(axis=1)
    return Interval(rows - min_rows - best, strengths[np.arange(ranks), best])


def change_point(series: npt.NDArray[np.floating[Any]], mean: float) -> int:
    """Return the row at which the mean of the series most likely changed from zero to `mean`.

    This is the maximum likelihood estimate for normal values (Hinkley, Biometrika 57, 1970). Values
    are clipped at `mean` plus and minus twice the mean.
    """
    gains = np.clip(series, -mean, 3 * mean) - mean / 2
    return len(series) - 1 - int(np.cumsum(gains[::-1]).argmax())


def over_since(slow: npt.NDArray[np.bool_], usual_share: float, min_rows: int) -> int | None:
    """Return the row from which on slow rows are so rare that the slowness is over, or None.

    This is a likelihood ratio test of a fifth of the usual share against that share.
    """
    usual = min(max(usual_share, 0.05), 0.95)
    rare = usual / 5
    evidence = np.where(slow, np.log(rare / usual), np.log((1 - rare) / (1 - usual)))
    sums = np.cumsum(evidence[::-1])[min_rows - 1 :]
    if not len(sums) or sums.max() < -np.log(FALSE_ALARMS):
        return None
    return len(slow) - min_rows - int(sums.argmax())


def without_stalls(
    series: npt.NDArray[np.floating[Any]], scale: float
) -> npt.NDArray[np.floating[Any]]:
    """Return the series with single stalls reduced to the largest other value.

    At most one row in 16 is a stall, and only if it is far above the others. scale: noise of the
    series. A stall of seconds, by storage or a network, would otherwise dominate all means.
    """
    rare = max(1, len(series) // 16)
    if len(series) <= rare:
        return series
    usual = np.partition(series, -rare - 1)[-rare - 1]
    return np.where(series > usual + 2 * CLIP * scale, usual, series)


def threshold(ranks: int) -> float:
    """Return the standard errors that chance does not reach.

    sqrt(2 ln(n / p)) bounds n = ranks x intervals normal values, except with probability p.
    """
    return float(np.sqrt(2 * np.log(ranks * _MAX_INTERVALS / FALSE_ALARMS)))


def self_normalized_threshold(ranks: int) -> float:
    """Return the threshold for standard errors by an interval's own spread.

    It is the bound of threshold() for one interval of each rank and a probability of 1 in 200. It
    can be lower, as it is applied only to intervals that have passed threshold().
    """
    return float(np.sqrt(2 * np.log(200 * ranks)))


def is_persistent(
    series: npt.NDArray[np.floating[Any]], scale: float, min_errors: float, *, strict: bool = False
) -> bool:
    """Return True if the excess is present in all quarters of an interval but one; strict: in all,
    and evenly.

    The excess must also be significant by the interval's own spread, as a few long stalls are not a
    lasting excess. scale: noise of the series. min_errors: the lowest number of standard errors by
    the interval's own spread.
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
    """Return the excess without the part that a larger workload explains: [ranks, rows], as are
    both arguments.

    The explained part is one linear fit for all ranks and rows. It is subtracted only if that
    reduces the excess. It is not subtracted for a rank that has had clearly more workload in the
    newest `min_rows` or more rows: that is a finding of its own. Rows with an unknown workload
    (NaN) are not changed.
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
    scale = noise(more)
    lasting = strongest_interval(more / scale, min_rows)
    for rank in np.flatnonzero(lasting.z_score > threshold(len(more))).tolist():
        since = slice(int(lasting.start[rank]), None)
        if is_persistent(
            more[rank, since], scale, self_normalized_threshold(len(more)), strict=True
        ):
            left[rank, since] = excess[rank, since]
    return left
