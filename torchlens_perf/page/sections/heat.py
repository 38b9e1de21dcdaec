"""Ranks by steps: where in the run which rank had more work than the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.quantities import percent, steps_words
from torchlens_perf.page.decoded import Steps
from torchlens_perf.page.pictures.heat import (
    FULL_SCALE,
    MAX_COLUMNS,
    MAX_ROWS,
    flag_legend,
    heat_picture,
    legend,
)
from torchlens_perf.page.sections.section import details, figure, of_picture, section
from torchlens_perf.page.sections.section import old_table as table
from torchlens_perf.view.markup import Child, Element, tag

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.page.contents import Contents, StepMatrices

_MAX_TABLE = 32
_NOTICED = 0.03


def heat(contents: Contents) -> Element | None:
    matrices = contents["steps"]
    if matrices is None or len(matrices["places"]) < 2:
        return None
    steps = Steps(matrices, MAX_COLUMNS)
    excess = steps.excess()
    if not np.isfinite(excess).any():
        return None
    means = _means(excess)
    words = _words(steps.ranks, means, matrices)
    picture = heat_picture(excess, steps.ranks, steps.columns, matrices["slow"], words)
    how = "Orange: more work than the median of the other ranks that do the same; blue: less; full colour: "
    how += f"{FULL_SCALE:.0%} and more."
    width = steps.columns["width"]
    how += f" Each cell is the mean of {width} steps." if width > 1 else " Each cell is one step."
    if len(steps.ranks) > MAX_ROWS:
        how += (
            f" Each row is several ranks, by the one that has most more work; the table has the {_MAX_TABLE} with most."
        )
    if letters := flag_legend(steps.columns):
        how += f" Below: {letters}."
    caption: Child = [tag("strong", words), " ", of_picture(how, legend())]
    return section("heat", "Ranks by step", figure("heat", picture, caption), _table(steps, excess, means, matrices))


def _means(excess: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    known = np.isfinite(excess)
    counts = known.sum(axis=1)
    sums = np.where(known, excess, 0.0).sum(axis=1)
    found: npt.NDArray[np.float64] = np.divide(sums, counts, out=np.full(len(excess), np.nan), where=counts > 0)
    return found


def _words(ranks: list[int], means: npt.NDArray[np.float64], matrices: StepMatrices) -> str:
    slow = matrices["slow"]
    highest = int(np.nanargmax(means))
    most = f"over the whole run, rank {ranks[highest]} is most above the others: {_signed(means[highest])} in the mean"
    if not slow:
        return f"No rank was named as slow; {most}."
    named = []
    for each in slow[:4]:
        named.append(f"rank {each['rank']} {steps_words(each['since_step'], each['until_step'])}")
    rest = f" and {len(slow) - 4} more times" if len(slow) > 4 else ""
    return f"Named as slow: {'; '.join(named)}{rest}; {most}."


def _table(
    steps: Steps, excess: npt.NDArray[np.float64], means: npt.NDArray[np.float64], matrices: StepMatrices
) -> Element:
    order = np.argsort(-np.nan_to_num(means, nan=-np.inf), kind="stable")[:_MAX_TABLE].tolist()
    rows = []
    for row in order:
        values = excess[row][np.isfinite(excess[row])]
        slow = [each for each in matrices["slow"] if each["rank"] == steps.ranks[row]]
        times = ", ".join(steps_words(each["since_step"], each["until_step"]) for each in slow)
        noticed = f"{int((values > _NOTICED).sum())} of {len(values)}" if len(values) else "-"
        rows.append(
            [
                str(steps.ranks[row]),
                _signed(float(means[row])) if len(values) else "-",
                _signed(float(values.max())) if len(values) else "-",
                noticed,
                times or "-",
            ]
        )
    headers = ["rank", "mean", "highest", f"cells above {_NOTICED:.0%}", "named as slow in steps"]
    which = f"the {len(rows)} of {len(steps.ranks)} ranks with most" if len(rows) < len(steps.ranks) else "all ranks"
    caption = f"Work above the median of the others, as a share of it; {which}"
    return details("As a table", table(caption, headers, rows, texts=(4,)))


def _signed(share: float) -> str:
    return f"+{percent(share)}" if share >= 0 else f"\u2212{percent(-share)}"
