"""Tell changes between two sides of runs from noise. Pure.

A run is one sample: its steps share a process, a placement and a time of day. The variation between
the runs of a side is therefore the noise; the variation within runs is a lower bound of it.

All measures are tested together, so the probability of any false change in a comparison is 5 %. The
critical value of the largest statistic comes from permutations of the runs (Westfall and Young 1993)
if there are enough of them, otherwise from simulated normal samples.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import statistics

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


# Probability that one family of tests reports any change of equal sides: 5 % for a comparison of
# two. The step with its parts is one family and the details are the other one, so that many modules
# do not hide a change of the step.
_FALSE_ALARMS = 0.025
# A standard error below this share of the value would make rounding look like a change.
_MIN_SPREAD = 0.001
# With fewer permutations, none is rare enough for a false alarm rate of 5 %.
_MIN_PERMUTATIONS = 40
_MAX_PERMUTATIONS = 1000
_SIMULATED = 256_000
# A change that is this many standard errors above the critical value is found in 4 of 5 cases.
_POWER_80 = 0.9
_NUMBERS_OF_RUNS = (5, 7, 10, 14, 20, 30, 50)
MOST_RUNS = _NUMBERS_OF_RUNS[-1]


class Outcome(enum.Enum):
    """The three results of a comparison."""

    SAME = "same"
    CHANGED = "changed"
    UNKNOWN = "cannot say"


@dataclasses.dataclass(frozen=True)
class Change:
    """The difference of one measure between two sides, in the unit of the measure."""

    before: float
    after: float
    low: float
    """Lower end of the interval of the difference. All intervals of a comparison hold together
    with 95 % probability."""
    high: float
    detectable: float
    """Smallest change that would be found in 4 of 5 comparisons like this one."""
    spread: float
    """Standard deviation of a run, as measured or assumed for this comparison."""
    outcome: Outcome

    @property
    def difference(self) -> float:
        """After minus before."""
        return self.after - self.before

    @property
    def share(self) -> float:
        """The difference as a share of the value before."""
        return self.difference / self.before


def find_changes(
    before: Floats,
    after: Floats,
    noise_before: Floats,
    noise_after: Floats,
    assumed: Floats,
    worth: Floats,
    margin: Floats,
) -> list[Change]:
    """Return the change of each measure of one family.

    before, after: values of the runs of a side, (runs, measures). noise_*: standard errors of these
    values from within the runs. By measure: assumed, the standard deviation between runs for a side
    with one run; worth, the smallest difference to report; margin, a difference that counts as no
    change.
    """
    values = np.concatenate([before, after])
    noise = np.nan_to_num(np.concatenate([noise_before, noise_after]))
    runs = len(before)
    smallest = _MIN_SPREAD * np.abs(values).mean(axis=0) / math.sqrt(runs)
    critical = _critical_value(values, noise, assumed, smallest, runs)
    actual = (np.arange(len(values)) < runs)[None, :]
    difference, error = (each[0] for each in _difference_and_error(values, noise, assumed, actual))
    error = np.maximum(error, smallest)
    low, high = difference - critical * error, difference + critical * error
    detectable = np.maximum((critical + _POWER_80) * error, worth)
    spread = error / math.sqrt(1 / runs + 1 / len(after))
    is_certain = (low > 0) | (high < 0)
    outcomes = np.full(len(low), Outcome.UNKNOWN, object)
    outcomes[is_certain | (np.maximum(-low, high) <= margin)] = Outcome.SAME
    outcomes[is_certain & (np.abs(difference) >= worth)] = Outcome.CHANGED
    columns = (before.mean(axis=0), after.mean(axis=0), low, high, detectable, spread, outcomes)
    return [Change(*row) for row in zip(*(each.tolist() for each in columns), strict=True)]


def find_detectable(change: Change, runs: int, measures: int) -> float:
    """Return the smallest change that comparisons of this many runs of each side would find in 4 of
    5 cases, if runs vary as they did here. measures: number of measures that are tested together."""
    critical = _simulated_critical_value(runs, runs, _false_alarms_of_one(measures))
    return (critical + _POWER_80) * change.spread * math.sqrt(2 / runs)


def count_runs_to_decide(change: Change, margin: float, measures: int) -> int | None:
    """Return how many runs of each side would find the difference, or show that it is negligible.

    Return None if that is more than MOST_RUNS. margin: a difference that counts as no change.
    """
    needed = max(abs(change.difference), margin - abs(change.difference))
    enough = (n for n in _NUMBERS_OF_RUNS if find_detectable(change, n, measures) <= needed)
    return next(enough, None)


def _difference_and_error(
    values: Floats, noise: Floats, assumed: Floats, is_before: npt.NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """Return the difference of the means, after minus before, and its standard error.

    is_before: assignments of the runs to a side, (assignments, runs). The results have the shape
    (assignments, measures).
    """
    means, variances = [], []
    for side in (is_before, ~is_before):
        weights = side.astype(float)
        runs = weights[0].sum()
        mean = weights @ values / runs
        variance = weights @ noise**2 / runs
        if runs > 1:
            spread = (weights @ values**2 - runs * mean**2) / (runs - 1)
            variance = np.maximum(variance, spread)
        else:
            variance = variance + assumed**2
        means.append(mean)
        variances.append(variance / runs)
    return means[1] - means[0], np.sqrt(variances[0] + variances[1])


def _critical_value(
    values: Floats,
    noise: Floats,
    assumed: Floats,
    smallest: Floats,
    runs: int,
) -> float:
    """Return the largest statistic that equal sides exceed with probability _FALSE_ALARMS.

    smallest: by measure, the smallest standard error that counts. Residuals are permuted, so a true
    change of one measure does not hide those of others.
    """
    of_one = _false_alarms_of_one(values.shape[1])
    if math.comb(len(values), runs) < _MIN_PERMUTATIONS or min(runs, len(values) - runs) < 2:
        return _simulated_critical_value(runs, len(values) - runs, of_one)
    residuals = np.concatenate([
        (side - side.mean(axis=0)) * math.sqrt(len(side) / (len(side) - 1))
        for side in (values[:runs], values[runs:])
    ])  # fmt: skip
    assignments = _assignments(len(values), runs)
    difference, error = _difference_and_error(residuals, noise, assumed, assignments)
    largest = np.max(np.abs(difference) / np.maximum(error, smallest), axis=1)
    # Where noise within the runs is larger than between them, residuals are too small to count.
    known_variance = statistics.NormalDist().inv_cdf(1 - of_one / 2)
    return max(known_variance, float(np.quantile(largest, 1 - _FALSE_ALARMS, method="higher")))


def _false_alarms_of_one(measures: int) -> float:
    """Return the rate of false alarms of each measure of a family, if they are independent."""
    return 1 - (1 - _FALSE_ALARMS) ** (1 / measures)


def _assignments(total: int, chosen: int) -> npt.NDArray[np.bool_]:
    """Return assignments of the runs to a side: all of them, or a random choice of many."""
    if math.comb(total, chosen) <= _MAX_PERMUTATIONS:
        rows = list(itertools.combinations(range(total), chosen))
    else:
        generator = np.random.default_rng(0)
        rows = [tuple(generator.permutation(total)[:chosen]) for _ in range(_MAX_PERMUTATIONS)]
    is_before = np.zeros((len(rows), total), bool)
    np.put_along_axis(is_before, np.array(rows), True, axis=1)
    return is_before


def _simulated_critical_value(before: int, after: int, false_alarms: float) -> float:
    """Return the critical value of one measure with normal noise.

    The variance of a side with one run is assumed and not estimated.
    """
    generator = np.random.default_rng(0)
    difference = generator.standard_normal(_SIMULATED) * math.sqrt(1 / before + 1 / after)
    variance = np.zeros(_SIMULATED)
    for runs in (before, after):
        scale = generator.chisquare(runs - 1, _SIMULATED) / (runs - 1) if runs > 1 else 1.0
        variance += scale / runs
    return float(np.quantile(np.abs(difference) / np.sqrt(variance), 1 - false_alarms))
