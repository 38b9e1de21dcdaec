"""Ranks by steps: when in the run which rank computed longer than the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.quantities import steps_words
from torchlens_perf.page.decoded import Steps
from torchlens_perf.view.html import figure, section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.page.contents import Contents, SlowTime
    from torchlens_perf.view.markup import Element

_FEWEST_RANKS = 5
"""Fewer are compared by lines, see page.js."""
_MAX_TIMES = 3


def heat(contents: Contents) -> Element | None:
    """Return the section; None where no ranks are compared."""
    matrices = contents["steps"]
    if matrices is None or len(matrices["places"]) < 2 or not np.isfinite(Steps(matrices).excess()).any():
        return None
    few = len(matrices["places"]) < _FEWEST_RANKS
    title = "Compute time per step" if few else "Compute time compared with the other ranks"
    return section("heat", "Ranks by step", figure("heat", title, _words(matrices["slow"])))


def _words(slow: Sequence[SlowTime]) -> str:
    if not slow:
        return "No slow rank."
    named = [f"rank {each['rank']} {steps_words(each['since_step'], each['until_step'])}" for each in slow[:_MAX_TIMES]]
    rest = f" and {len(slow) - _MAX_TIMES} more times" if len(slow) > _MAX_TIMES else ""
    return f"Slow: {'; '.join(named)}{rest}."
