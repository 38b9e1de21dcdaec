"""Two small charts of a run as static SVG, because untrusted notebooks run no scripts.

Each chart is embedded as an image, so charts and notebook cannot affect each other's styles. Images
do not inherit the notebook's theme. The images are transparent, and their greys are readable on
white and on black.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.page.sections.bars import describe_parts, draw_stacked_bar, draw_swatch
from torchlens_perf.verdicts.words.report import StepHistory
from torchlens_perf.view.markup import Element, raw_element, tag
from torchlens_perf.view.specs import Bar
from torchlens_perf.view.theme import PARTS, SLOWER

WIDTH = 620
MAX_BARS = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 24, 20
_PLOT_HEIGHT, _BAR, _BAR_GAP = 84, 14, 6
# Estimated width of a character, since the width of the legend's text cannot be measured.
_LETTER_PX = 6.2
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#777777}.t{font-weight:600}.g{stroke:#77777755}"
    f".l{{fill:none;stroke:#777777;stroke-width:1.6}}.b{{fill:#80808055}}.s{{fill:{SLOWER.light};fill-opacity:.15}}"
    + "".join(f".part-{key}{{fill:{part.color.light}}}" for key, part in PARTS.items())
    + ".share{fill:#10151a;text-anchor:middle}.on-backward,.on-cpu,.on-host{fill:#ffffff}"
)


def build_image(svg: str, says: str) -> Element:
    """Return an <img> that contains the chart. says: the alternative text."""
    data = base64.b64encode(svg.encode()).decode()
    return tag("img", alt=says, src=f"data:image/svg+xml;base64,{data}", style="max-width: 100%")


def draw_step_chart(
    history: StepHistory, made: int, slow: Sequence[tuple[int, int]] = (), where: str = ""
) -> tuple[str, str]:
    """Return an SVG chart of step time over the run, and its alternative text.

    The chart shows the median and the range of the ranks in each window as a level, so that a jump is
    drawn as a jump. made: number of steps of the run. slow: first steps of shaded ranges, in which a
    rank is slow, and first steps after them. where: text after "step time", such as " on the device".
    """
    steps = history["first_steps"]
    median_s = history["median_s"]
    fastest_s = history["fastest_s"]
    slowest_s = history["slowest_s"]
    # Only the warm-up has no times.
    first = steps[0] if steps[0] > history["width"] else 0
    last = min(made, steps[-1] + history["width"]) - 1
    several = any(high > low for high, low in zip(slowest_s, fastest_s, strict=True))
    title = f"step time{where}"
    says = (
        f"{title.capitalize()} over steps {first} to {last}, in windows of {history['width']} steps."
        f" The median step takes {format_duration(min(median_s))} to {format_duration(max(median_s))}."
    )
    if several:
        says += (
            f" Ranks take {format_duration(min(fastest_s))} to {format_duration(max(slowest_s))}."
        )
    top_s = max(slowest_s) * 1.08
    width, height = WIDTH - _LEFT - _RIGHT, _TOP + _PLOT_HEIGHT + _BOTTOM

    def place(step: int) -> float:
        return _LEFT + width * (min(max(step, first), last + 1) - first) / max(1, last + 1 - first)

    def trace(seconds: Sequence[float]) -> list[str]:
        heights = [_TOP + _PLOT_HEIGHT * (1 - each / top_s) for each in seconds]
        return [
            f"{place(at):.1f},{y:.1f}"
            for step, y in zip(steps, heights, strict=True)
            for at in (step, step + history["width"])
        ]

    range_words = " (median and range of the ranks)" * several
    slow_words = "; shaded: a rank is slow" * bool(slow)
    shades = [
        f"M{place(begin):.1f} {_TOP}H{place(end):.1f}v{_PLOT_HEIGHT}H{place(begin):.1f}z"
        for begin, end in slow
    ]
    parts = [
        _svg_text(8, 15, f"{title}{range_words}{slow_words}", "t"),
        tag("path", class_="s", d="".join(shades)),
    ]
    for seconds in round_marks(top_s, 4):
        y, (number, unit) = (
            _TOP + _PLOT_HEIGHT * (1 - seconds / top_s),
            format_duration(seconds).split(),
        )
        label = f"{float(number):g} {unit}" if seconds else "0"
        parts.append(tag("path", class_="g", d=f"M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"))
        parts.append(_svg_text(_LEFT - 6, y + 4, label, anchor="end"))
    if several:
        outline = trace(slowest_s) + trace(fastest_s)[::-1]
        parts.append(tag("polygon", class_="b", points=" ".join(outline)))
    parts.append(tag("polyline", class_="l", points=" ".join(trace(median_s))))
    parts.append(_svg_text(_LEFT - 6, height - 6, "step", anchor="end"))
    parts += [
        _svg_text(place(round(step)), height - 6, f"{step:.0f}", anchor="middle")
        for step in round_marks(last + 1, 6)
        if step >= first and step == round(step)
    ]
    return _svg_document(height, parts), says


def round_marks(end: float, most: int) -> list[float]:
    """Return 0 and the multiples of a round number up to `end`, at most `most` of them."""
    power = 10.0 ** math.floor(math.log10(end / most))
    size = next(each * power for each in (1, 2, 5, 10) if each * power * most >= end)
    return [size * at for at in range(int(end / size) + 1)]


def draw_parts_chart(
    known: Mapping[int, Mapping[str, float]],
    title: str,
    *,
    labelled: bool = True,
) -> tuple[str, str] | None:
    """Return an SVG chart of step parts on the first MAX_BARS ranks, and its alternative text.

    known: seconds of each part, by rank. labelled: show rank numbers.
    Return None if `known` is empty.
    """
    shown = list(known)[:MAX_BARS]
    if not shown:
        return None
    bars = [
        Bar(
            f"rank {rank}" * labelled,
            {part: known[rank][part] for part in PARTS if known[rank].get(part)},
        )
        for rank in shown
    ]
    longest_s = max(bar.total for bar in bars) or 1.0
    width = WIDTH - _LEFT - _RIGHT - 60
    of = f", {len(shown)} of {len(known)} ranks" if len(known) > len(shown) else ""
    drawn = [_svg_text(8, 15, f"{title}, by part{of}", "t")]
    for row, bar in enumerate(bars):
        y, end = _TOP + row * (_BAR + _BAR_GAP), _LEFT + width * bar.total / longest_s
        segments = draw_stacked_bar(bar, longest_s)
        drawn += [
            _svg_text(_LEFT - 6, y + 11, bar.label, anchor="end"),
            tag("svg", segments, x=_LEFT, y=y, width=width, height=_BAR),
            _svg_text(end + 5, y + 11, format_duration(bar.total)),
        ]
    y, x = _TOP + len(bars) * (_BAR + _BAR_GAP) + 12, float(_LEFT)
    for part in [part for part in PARTS if any(part in bar.seconds for bar in bars)]:
        words = f"{PARTS[part].glyph} {PARTS[part].name}"
        taken = 13 + _LETTER_PX * len(words)
        if x + taken > WIDTH:
            x, y = float(_LEFT), y + 16
        drawn += [
            tag("svg", draw_swatch(part), x=x, y=y - 8, width=9, height=9),
            _svg_text(x + 13, y, words),
        ]
        x += taken + 12
    words = "; ".join(
        f"{bar.label} {format_duration(bar.total)}: {describe_parts(bar)}".strip() for bar in bars
    )
    return _svg_document(y + 10, drawn), f"{title.capitalize()}, by part{of}. {words}."


def _svg_text(
    x: float, y: float, text: str, kind: str | None = None, anchor: str | None = None
) -> Element:
    return tag("text", text, class_=kind, x=x, y=y, text_anchor=anchor)


def _svg_document(height: float, parts: Sequence[Element]) -> str:
    drawn = tag(
        "svg", raw_element("style", _STYLE), parts, xmlns="http://www.w3.org/2000/svg", width=WIDTH, height=height,
        viewBox=f"0 0 {WIDTH} {height}",
    )  # fmt: skip
    return ElementTree.tostring(drawn, encoding="unicode")
