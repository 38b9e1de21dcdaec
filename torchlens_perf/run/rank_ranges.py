"""Format and parse sets of ranks as short text, such as "0-3,8,16-1000/8".

Even a group of ten thousand ranks usually consists of a few ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_RANKS = 1 << 20
"""Largest number of ranks that parse_ranges() returns. A text from an untrusted source could
otherwise use all memory.
"""


def format_ranges(ranks: Sequence[int]) -> str:
    """Format ranks as ascending ranges `first-last/stride`, joined by commas."""
    parts, left = [], sorted(ranks)
    while left:
        stride = left[1] - left[0] if len(left) > 1 else 1
        count = 1
        while count < len(left) and left[count] - left[count - 1] == stride:
            count += 1
        if count < 5 and stride > 1:
            # Two ranks do not prove a stride: the second rank may begin another range. Few ranks are
            # easier to read one by one.
            count = 1
        first, last = left[0], left[count - 1]
        parts.append(
            str(first) if count == 1 else f"{first}-{last}" + (f"/{stride}" if stride > 1 else "")
        )
        left = left[count:]
    return ",".join(parts)


def format_rank_list(ranks: Sequence[int]) -> str:
    """Format ranks for a sentence, such as "rank 3" or "ranks 1,4-7"."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}"


def parse_ranges(text: str) -> tuple[int, ...]:
    """Parse a text of format_ranges(). Raise ValueError if the text is invalid or too long."""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        span, _, stride = part.partition("/")
        first, _, last = span.partition("-")
        more = range(int(first), int(last or first) + 1, int(stride or 1))
        if more and (more[-1] >= 1 << 62 or len(more) + len(ranks) > MAX_RANKS):
            raise ValueError(f"more than {MAX_RANKS} ranks")
        ranks.extend(more)
    return tuple(ranks)
