"""The host code between the phases: the user's sections in it, and its place in a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Facts, Section

NEARLY = 0.8
"""Two times are nearly equal if the smaller is at least this share of the larger."""


_WORTH_SAYING = 0.1
"""Smallest share of a step for which the places of its host code are listed."""
_MOST_PLACES = 4


def describe_host_gaps(report: Facts) -> str:
    """Return between which phases the host code of a step is; "" if there is little of it."""
    gaps = report["steps"]["host_gaps"]
    whole_s, typical = sum(gaps.values()), [each["typical"] for each in report["ranks"]]
    step_s = max((each["s"] for each in typical if each is not None), default=0.0)
    if not step_s or whole_s < _WORTH_SAYING * step_s:
        return ""
    places = [
        f"{format_duration(seconds)} from {' to '.join(gap.split('>'))}"
        for gap, seconds in gaps.items()
        if seconds >= _WORTH_SAYING * whole_s
    ]
    return (
        f"Host code between the phases, with the recording: {format_duration(whole_s)}"
        f" ({format_percent(whole_s / step_s)} of the step), of which"
        f" {', '.join(places[:_MOST_PLACES])}."
    )


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
