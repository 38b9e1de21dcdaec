"""Places, lines and the user's sections in the host code between the phases. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from torchlens_perf.verdicts.words.evidence import LargestGap, SampledLines
from torchlens_perf.verdicts.words.report import Rank, Section

NEARLY = 0.8
"""Two times are nearly equal if the smaller is at least this share of the larger."""
_NO_PHASE = "start>end"
# A place has most of the difference between ranks if it has at least this share of it.
_MOST = 0.6
# With fewer samples in a part of the step, no line is named, and at most this many are.
_MIN_SAMPLES, _MAX_LINES = 5, 2


def find_largest_gap(gaps_s: Mapping[str, float], least_s: float) -> LargestGap | None:
    """Return the place with most host code; None if no place has this time.

    A step without phases has no places.
    """
    at = max(gaps_s, key=lambda gap: gaps_s[gap], default=_NO_PHASE)
    if at == _NO_PHASE or gaps_s[at] < least_s:
        return None
    return LargestGap(at, gaps_s[at], sum(gaps_s.values()))


def find_longer_gap(
    ranks: Sequence[Rank], slow: Set[int], lead: int, least_s: float
) -> LargestGap | None:
    """Return the place where a slow rank needs most time beyond the mean of the ranks that are not
    slow; None if it needs less than `least_s` more there, or if that is not most of what it needs
    more. The times contain waits for a CPU.
    """
    others = [row["host_gaps"] for row in ranks if row["rank"] not in slow]
    mine: dict[str, float] = next((row["host_gaps"] for row in ranks if row["rank"] == lead), {})
    if not others:
        return None
    more_s = {
        gap: gap_s - sum(each.get(gap, 0.0) for each in others) / len(others)
        for gap, gap_s in mine.items()
    }
    return find_largest_gap(more_s, max(least_s, _MOST * sum(more_s.values())))


def find_lines(ranks: Sequence[Rank], part: str) -> SampledLines | None:
    """Return the fewest lines with most stack samples of a part of the step, on the rank with most.

    None with few samples, or if most of them are in many lines, or in lines that are not known.
    """
    by_rank = {
        rank["rank"]: Counter(
            {
                key.removeprefix(f"{part} at "): samples
                for key, samples in rank["lines"].items()
                if key.startswith(f"{part} at ")
            }
        )
        for rank in ranks
    }
    most, lines = max(by_rank.items(), key=lambda item: item[1].total(), default=(0, Counter()))
    for count in range(1, _MAX_LINES + 1):
        named = {line: number for line, number in lines.most_common(count) if line}
        if lines.total() >= _MIN_SAMPLES and 2 * sum(named.values()) > lines.total():
            return SampledLines(part, most, lines.total(), named)
    return None


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
