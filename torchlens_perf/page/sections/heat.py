"""Ranks by steps: when in the run which rank computed longer than the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.quantities import percent, steps_words
from torchlens_perf.page.decoded import Steps
from torchlens_perf.page.markup import Element
from torchlens_perf.page.sections.section import details, figure, section, table
from torchlens_perf.view.theme import MIN_EXCESS

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.page.contents import Contents, StepMatrices

_MAX_TABLE, _MAX_COLUMNS = 32, 240
_FEWEST_RANKS = 5  # Fewer are compared by lines, see page.js.


def heat(contents: Contents) -> Element | None:
    matrices = contents["steps"]
    if matrices is None or len(matrices["places"]) < 2:
        return None
    steps = Steps(matrices, _MAX_COLUMNS)
    excess = steps.excess()
    if not np.isfinite(excess).any():
        return None
    means = _means(excess)
    few = len(steps.ranks) < _FEWEST_RANKS
    title = "Compute time per step" if few else "Compute time compared with the other ranks"
    shown = figure("heat", title, _words(steps.ranks, means, matrices))
    return section("heat", "Ranks by step", shown, _table(steps, excess, means, matrices))


def _means(excess: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    known = np.isfinite(excess)
    counts = known.sum(axis=1)
    sums = np.where(known, excess, 0.0).sum(axis=1)
    found: npt.NDArray[np.float64] = np.divide(sums, counts, out=np.full(len(excess), np.nan), where=counts > 0)
    return found


def _words(ranks: list[int], means: npt.NDArray[np.float64], matrices: StepMatrices) -> str:
    slow = matrices["slow"]
    if not slow:
        highest = int(np.nanargmax(means))
        return f"No slow rank; rank {ranks[highest]} has the largest excess, {_signed(means[highest])} on average."
    named = [f"rank {each['rank']} {steps_words(each['since_step'], each['until_step'])}" for each in slow[:3]]
    rest = f" and {len(slow) - 3} more times" if len(slow) > 3 else ""
    return f"Slow: {'; '.join(named)}{rest}."


def _table(
    steps: Steps, excess: npt.NDArray[np.float64], means: npt.NDArray[np.float64], matrices: StepMatrices
) -> Element:
    order = np.argsort(-np.nan_to_num(means, nan=-np.inf), kind="stable")[:_MAX_TABLE].tolist()
    rows = []
    for row in order:
        values = excess[row][np.isfinite(excess[row])]
        slow = [each for each in matrices["slow"] if each["rank"] == steps.ranks[row]]
        times = ", ".join(steps_words(each["since_step"], each["until_step"]) for each in slow)
        noticed = f"{int((values > MIN_EXCESS).sum())} of {len(values)}" if len(values) else "-"
        rows.append(
            [
                str(steps.ranks[row]),
                _signed(float(means[row])) if len(values) else "-",
                _signed(float(values.max())) if len(values) else "-",
                noticed,
                times or "-",
            ]
        )
    headers = ["rank", "mean excess", "largest", f"cells above {MIN_EXCESS:.0%}", "slow"]
    which = (
        f"the {len(rows)} of {len(steps.ranks)} ranks with the largest" if len(rows) < len(steps.ranks) else "all ranks"
    )
    caption = f"Excess: compute time above the median of the other ranks, as a share of it; {which}"
    return details("As a table", table(caption, headers, rows, texts=(4,)))


def _signed(share: float) -> str:
    return f"+{percent(share)}" if share >= 0 else f"\u2212{percent(-share)}"
