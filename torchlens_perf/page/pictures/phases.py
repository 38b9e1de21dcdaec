"""Bars of durations, to one scale: what a typical step of each rank is made of, above all. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchlens_perf.analysis.statistics.quantities import duration
from torchlens_perf.page.pictures.frame import WIDTH, Frame, rect, svg, ticks, x_axis
from torchlens_perf.view.markup import Child, Element, tag

_LEFT, _ROW, _BAR, _TOP = 108.0, 22.0, 16.0, 4.0
WORDS = {"communication": "wait", "tool": "this tool", "cpu": "lack of a CPU"}


class Bar(NamedTuple):
    """One rank's step, by part in the order to draw; marked: it stands out."""

    label: str
    parts_s: dict[str, float]
    marked: bool


def phases_picture(
    bars: Sequence[Bar],
    description: str,
    key: str,
    title: str = "What a typical step of each rank is made of",
    label: str = "time in a step",
) -> Element:
    """description: what is to be seen, in words. key: unique in the page. label: of the axis."""
    longest = max((sum(bar.parts_s.values()) for bar in bars), default=0.0)
    frame = Frame(_LEFT, _TOP, WIDTH - _LEFT - 76, _ROW * len(bars), 0.0, longest)
    marks: list[Child] = []
    for index, bar in enumerate(bars):
        y, at_s = frame.top + index * _ROW, 0.0
        look = "marked" if bar.marked else None
        marks.append(tag("text", bar.label, x=frame.left - 7, y=y + 13, text_anchor="end", class_=look))
        for part, seconds in bar.parts_s.items():
            x = frame.x(at_s)
            words = f"{bar.label}: {WORDS.get(part, part)} {duration(seconds)}"
            marks.append(rect(x, y, frame.x(at_s + seconds) - x, _BAR, f"part {part}", words))
            at_s += seconds
        marks.append(tag("text", duration(at_s), x=frame.x(at_s) + 6, y=y + 13))
    marks.append(x_axis(frame, ticks(0, longest), duration, label))
    return svg(WIDTH, frame.bottom + 40, key, title, description, marks)


def part_legend(parts: Sequence[str], spans: Mapping[str, str] | None = None) -> Element:
    """Colours of parts, and of other spans, by what they are in CSS."""
    looks = {f"part {part}": WORDS.get(part, part) for part in parts}
    looks.update({f"span {kind}": words for kind, words in (spans or {}).items()})
    items = [
        tag(
            "li",
            tag("svg", rect(0, 0, 14, 14, look), viewBox="0 0 14 14", class_="swatch", aria_hidden="true"),
            words,
        )
        for look, words in looks.items()
    ]
    return tag("ul", items, class_="legend", aria_label="Colours")
