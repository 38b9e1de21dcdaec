"""Two small charts of a run as static SVG images, for notebooks, which run no scripts until they are trusted.

Each image is a whole document with its own background, dark where the reader prefers that: no style acts across it.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import duration
from torchlens_perf.errors import printable
from torchlens_perf.view.theme import PARTS

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import StepHistory

WIDTH = 620
MAX_BARS = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 12, 24, 20
_PLOT_HEIGHT, _BAR, _BAR_GAP = 84, 14, 6
_LETTER_PX = 6.2
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#24292f}.m{fill:#57606a}.t{font-weight:600}.g{stroke:#d0d7de}"
    ".l{fill:none;stroke:#24292f;stroke-width:1.6}.d{fill:#24292f}.b{fill:#808080;fill-opacity:.35}.p{fill:#fff}"
    + "".join(f".{key}{{fill:{part.color.light}}}" for key, part in PARTS.items())
    + "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.d{fill:#e6edf3}.m{fill:#9da7b3}.g{stroke:#3d444d}"
    ".p{fill:#161b22}.l{stroke:#e6edf3}"
    + "".join(f".{key}{{fill:{part.color.dark}}}" for key, part in PARTS.items())
    + "}"
)


def image(svg: str, says: str) -> str:
    """Return an <img> that holds the picture. says: the same in words."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{html.escape(printable(says))}" src="data:image/svg+xml;base64,{data}" style="max-width: 100%">'


def step_chart(history: StepHistory, where: str = "") -> tuple[str, str]:
    """Return the step time over the run, the median and the range of the ranks, as SVG and in words.

    where: the clock, after "step time".
    """
    steps, median_s, fastest_s, slowest_s = (
        history["first_steps"], history["median_s"], history["fastest_s"], history["slowest_s"],
    )  # fmt: skip
    last = steps[-1] + history["width"] - 1
    several = any(high > low for high, low in zip(slowest_s, fastest_s, strict=True))
    says = (
        f"Step time{where} over steps {steps[0]} to {last}, in windows of {history['width']}: a usual step takes "
        f"{duration(min(median_s))} to {duration(max(median_s))}"
    )
    says += f"; ranks are between {duration(min(fastest_s))} and {duration(max(slowest_s))}." if several else "."
    top_s = max(slowest_s) * 1.08
    width, height = WIDTH - _LEFT - _RIGHT, _TOP + _PLOT_HEIGHT + _BOTTOM
    first, span = steps[0], max(1, steps[-1] + history["width"] - steps[0])

    def at(step: float, seconds: float) -> str:
        x = _LEFT + width * (step + history["width"] / 2 - first) / span
        return f"{x:.1f},{_TOP + _PLOT_HEIGHT * (1 - seconds / top_s):.1f}"

    parts = [_text(8, 15, f"step time{where}" + (": median of the ranks, and their range" if several else ""), "t")]
    for share in (0.0, 0.5, 1.0):
        y = _TOP + _PLOT_HEIGHT * (1 - share)
        label = "0" if not share else duration(top_s * share)
        parts.append(f'<path class="g" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y + 4, label, "m", "end"))
    if several:
        there = [at(*point) for point in zip(steps, slowest_s, strict=True)]
        back = [at(*point) for point in zip(reversed(steps), reversed(fastest_s), strict=True)]
        parts.append(f'<polygon class="b" points="{" ".join(there + back)}"/>')
    points = [at(*point) for point in zip(steps, median_s, strict=True)]
    if len(points) == 1:
        across, down = points[0].split(",")
        parts.append(f'<circle class="d" cx="{across}" cy="{down}" r="2.5"/>')
    parts.append(f'<polyline class="l" points="{" ".join(points)}"/>')
    parts.append(_text(_LEFT, height - 6, f"step {first}", "m"))
    parts.append(_text(WIDTH - _RIGHT, height - 6, f"step {last}", "m", "end"))
    return _svg(height, parts), says


def parts_chart(
    known: Mapping[int, Mapping[str, float]], title: str, first: Sequence[int] = ()
) -> tuple[str, str] | None:
    """Return the parts of a step of each rank, of MAX_BARS ranks at most, as SVG and in words.

    known: by rank, the seconds of each part. first: ranks to show before others. None where no rank is known.
    """
    shown = _chosen(list(known), [rank for rank in first if rank in known])
    if not shown:
        return None
    names = [part for part in PARTS if any(known[rank].get(part, 0.0) > 0 for rank in shown)]
    step_s = {rank: sum(known[rank].values()) for rank in shown}
    longest_s = max(step_s.values()) or 1.0
    width = WIDTH - _LEFT - _RIGHT - 60
    of = f", {len(shown)} of {len(known)} ranks" if len(known) > len(shown) else ""
    parts, words = [_text(8, 15, f"{title}, by part{of}", "t")], []
    for row, rank in enumerate(shown):
        y, x = _TOP + row * (_BAR + _BAR_GAP), float(_LEFT)
        parts.append(_text(_LEFT - 6, y + 11, f"rank {rank}", "m", "end"))
        for part in names:
            length = width * known[rank].get(part, 0.0) / longest_s
            if length > 0:
                parts.append(f'<path d="M{x:.1f} {y}h{length:.1f}v{_BAR}h-{length:.1f}z" class="{part}"/>')
                x += length
        parts.append(_text(x + 5, y + 11, duration(step_s[rank]), "m"))
        of_rank = ", ".join(
            f"{PARTS[part].name} {duration(known[rank][part])}" for part in names if part in known[rank]
        )
        words.append(f"rank {rank} {duration(step_s[rank])}: {of_rank}")
    y, x = _TOP + len(shown) * (_BAR + _BAR_GAP) + 12, float(_LEFT)
    for part in names:
        label = PARTS[part].name
        parts.append(f'<path d="M{x:.1f} {y - 8}h9v9h-9z" class="{part}"/>' + _text(x + 13, y, label, "m"))
        x += 13 + _LETTER_PX * len(label) + 12
    return _svg(round(y) + 10, parts), f"{title.capitalize()}, by part{of}. {'; '.join(words)}."


def _chosen(ranks: list[int], first: list[int]) -> list[int]:
    """Return at most MAX_BARS of the ranks, sorted: those to show first, and others evenly."""
    if len(ranks) <= MAX_BARS:
        return sorted(ranks)
    chosen = list(dict.fromkeys(first))[: MAX_BARS // 2]
    others = sorted(set(ranks) - set(chosen))
    room = MAX_BARS - len(chosen)
    return sorted([*chosen, *(others[i * len(others) // room] for i in range(room))])


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{where}>{html.escape(printable(text))}</text>'


def _svg(height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
        f'<style>{_STYLE}</style><rect class="p" width="{WIDTH}" height="{height}" rx="6"/>{"".join(parts)}</svg>'
    )
