"""The user's sections in the host code between the phases. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Section

NEARLY = 0.8
"""Two times are nearly equal if the smaller is at least this share of the larger."""


def divide_host_code(sections: Sequence[Section], host_s: float) -> dict[str, float]:
    """Return the seconds per typical step of each section, the largest section first.

    host_s: seconds of host code in a typical step, which the sections do not exceed together.

    A section inside another one takes part of the other's time. Of sections that nearly fill each
    other, the inner one is named.
    """
    found: dict[str, float] = {}
    left_s = host_s
    rows = [(row["host_s_per_typical_step"] or 0.0, row["name"]) for row in sections]
    for seconds, name in sorted(rows, reverse=True):
        inner = [other for other in rows if NEARLY * seconds <= other[0] <= seconds]
        seconds, name = min(inner, default=(seconds, name))
        if name not in found and 0 < seconds <= left_s / NEARLY:
            found[name] = min(seconds, left_s)
            left_s -= found[name]
    return found
