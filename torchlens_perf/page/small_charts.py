"""Two small charts of a run as static SVG, because untrusted notebooks run no scripts.

Each chart is embedded as an image, so charts and notebook cannot affect each other's styles. Images
do not inherit the notebook's theme. The images are transparent, and their greys are readable on
white and on black.
"""

from __future__ import annotations

import base64
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
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 12, 24, 20
_PLOT_HEIGHT, _BAR, _BAR_GAP = 84, 14, 6
# Estimated width of a character, since the width of the legend's text cannot be measured.
_LETTER_PX = 6.2
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#777777}.t{font-weight:600}.g{stroke:#77777755}"
    f".l{{fill:none;stroke:#777777;stroke-width:1.6}}.b{{fill:#80808055}}.s{{fill:{SLOWER.light};fill-opacity:.15}}"
    + "".join(f".part-{key}{{fill:{part.color.light}}}" for key, part in PARTS.items())
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
    for share in (0.0, 0.5, 1.0):
        y, label = _TOP + _PLOT_HEIGHT * (1 - share), format_duration(top_s * share)
        parts.append(tag("path", class_="g", d=f"M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"))
        parts.append(_svg_text(_LEFT - 6, y + 4, label if share else "0", anchor="end"))
    if several:
        outline = trace(slowest_s) + trace(fastest_s)[::-1]
        parts.append(tag("polygon", class_="b", points=" ".join(outline)))
    parts.append(tag("polyline", class_="l", points=" ".join(trace(median_s))))
    parts.append(_svg_text(_LEFT, height - 6, f"step {first}"))
    parts.append(_svg_text(WIDTH - _RIGHT, height - 6, f"step {last}", anchor="end"))
    return _svg_document(height, parts), says


def draw_parts_chart(
    known: Mapping[int, Mapping[str, float]],
    title: str,
    first: Sequence[int] = (),
    *,
    labelled: bool = True,
) -> tuple[str, str] | None:
    """Return an SVG chart of step parts on at most MAX_BARS ranks, and its alternative text.

    known: seconds of each part, by rank. first: preferred ranks. labelled: show rank numbers.
    Return None if `known` is empty.
    """
    shown = _choose_ranks(list(known), [rank for rank in first if rank in known])
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
        segments = draw_stacked_bar(bar, longest_s, shares=False)
        drawn += [
            _svg_text(_LEFT - 6, y + 11, bar.label, anchor="end"),
            tag("svg", segments, x=_LEFT, y=y, width=width, height=_BAR),
            _svg_text(end + 5, y + 11, format_duration(bar.total)),
        ]
    y, x = _TOP + len(bars) * (_BAR + _BAR_GAP) + 12, float(_LEFT)
    for part in [part for part in PARTS if any(part in bar.seconds for bar in bars)]:
        taken = 13 + _LETTER_PX * len(PARTS[part].name)
        if x + taken > WIDTH:
            x, y = float(_LEFT), y + 16
        drawn += [
            tag("svg", draw_swatch(part), x=x, y=y - 8, width=9, height=9),
            _svg_text(x + 13, y, PARTS[part].name),
        ]
        x += taken + 12
    words = "; ".join(
        f"{bar.label} {format_duration(bar.total)}: {describe_parts(bar)}".strip() for bar in bars
    )
    return _svg_document(y + 10, drawn), f"{title.capitalize()}, by part{of}. {words}."


def _choose_ranks(ranks: list[int], first: list[int]) -> list[int]:
    """Return at most MAX_BARS ranks in order: preferred ranks, and an even sample of the rest."""
    if len(ranks) <= MAX_BARS:
        return sorted(ranks)
    chosen = list(dict.fromkeys(first))[: MAX_BARS // 2]
    others = sorted(set(ranks) - set(chosen))
    room = MAX_BARS - len(chosen)
    return sorted([*chosen, *(others[i * len(others) // room] for i in range(room))])


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
