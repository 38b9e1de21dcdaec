"""The lanes of an iteration: what each process did, with the critical path drawn in. Pure.

A lane is a row of rectangles, and the path is a line that goes from lane to lane. The SVG is
stretched to the width of the page, so texts are outside of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from msgspec.structs import replace

from torchlens_perf.analysis.statistics.quantities import (
    format_duration,
    printable,
)
from torchlens_perf.roles.event_file import ROLES
from torchlens_perf.roles.facts import PARTS, IterationLanes, Lane, Span
from torchlens_perf.roles.iterations import Interval, Iteration

_MOST_OF_ROLE = 4
_HEIGHT, _WIDTH = 22, 1000
_LEGEND = {
    "busy": "busy", "weights": "weights", "path": "critical path", "path-wait": "critical path, waiting"
}  # fmt: skip


def build_lanes(
    iterations: Sequence[Iteration], intervals: Sequence[Interval], roles: Mapping[str, str]
) -> list[IterationLanes]:
    """Return the lanes of the typical and of the slowest iteration.

    intervals: of all processes. roles: role by process.
    """
    ordered = sorted(iterations, key=lambda each: each.seconds)
    shown = {"typical": ordered[(len(ordered) - 1) // 2], "slowest": ordered[-1]}
    return [_build(kind, each, intervals, roles) for kind, each in shown.items()]


def _build(
    kind: str, iteration: Iteration, intervals: Sequence[Interval], roles: Mapping[str, str]
) -> IterationLanes:
    spans: dict[str, list[Span]] = defaultdict(list)
    for each in intervals:
        begin_s, end_s = max(iteration.begin_s, each.begin_s), min(iteration.end_s, each.end_s)
        if end_s > begin_s:
            what = "weights" if each.stage.startswith("weights") else "busy"
            spans[each.process].append(
                Span(what, each.process, begin_s - iteration.begin_s, end_s - iteration.begin_s)
            )
    path = [
        Span(part, process, begin_s - iteration.begin_s, end_s - iteration.begin_s)
        for part, process, begin_s, end_s in iteration.path()
        if end_s > begin_s
    ]
    lanes = [
        Lane(process, role, sum(each.end_s - each.begin_s for each in merged), merged)
        for process, role in roles.items()
        for merged in [_merge(spans[process])]
    ]
    on_path = {each.process for each in path}
    kept = [
        each for role in ROLES for each in _choose([o for o in lanes if o.role == role], on_path)
    ]
    others = Counter(each.role for each in lanes) - Counter(each.role for each in kept)
    return IterationLanes(kind, iteration.batch, iteration.seconds, kept, path, dict(others))


def _merge(spans: Sequence[Span]) -> list[Span]:
    """Return spans, those of the same kind that overlap as one."""
    merged: list[Span] = []
    for each in sorted(spans, key=lambda each: (each.what, each.begin_s)):
        last = merged[-1] if merged else each
        if each.what == last.what and last is not each and each.begin_s <= last.end_s:
            merged[-1] = replace(last, end_s=max(last.end_s, each.end_s))
        else:
            merged.append(each)
    return merged


def _choose(lanes: Sequence[Lane], on_path: set[str]) -> list[Lane]:
    """Return all of a few lanes; of many, those on the path, the most busy and the least busy one."""
    ordered = sorted(lanes, key=lambda each: each.busy_s)
    if len(ordered) > _MOST_OF_ROLE:
        ordered = [
            each for each in ordered if each.process in on_path or each in (ordered[0], ordered[-1])
        ]
    return sorted(ordered, key=lambda each: each.process)


def draw_lanes(lanes: IterationLanes) -> tuple[str, str, Element]:
    """Return a title, a caption and the drawing."""
    title = f"{lanes.kind.capitalize()} iteration: {lanes.batch} ({format_duration(lanes.seconds)})"
    text = ", ".join(
        PARTS[each.what]
        + f" on {each.process}" * (each.process != each.what)
        + f" {format_duration(each.end_s - each.begin_s)}"
        for each in lanes.path
        if each.end_s - each.begin_s >= 0.005 * lanes.seconds
    )
    rest = ", ".join(f"{count} of {role}" for role, count in lanes.others.items())
    caption = f"Critical path: {text}." + f" Not shown: {rest}." * bool(rest)
    names = [
        _tag(
            "li",
            text=each.process if each.role in each.process else f"{each.role}: {each.process}",
        )
        for each in lanes.lanes
    ]
    return title, caption, _tag(
        "div",
        _tag(
            "ul",
            *(_tag("li", _swatch(key), _tag("span", text=words)) for key, words in _LEGEND.items()),
            class_="legend",
        ),
        _tag("div", _tag("ul", *names), _draw(lanes, f"{title}. {caption}"), class_="lanes"),
        _tag(
            "p",
            _tag("span", text="0"),
            _tag("span", text=format_duration(lanes.seconds)),
            class_="lane-times",
        ),
    )  # fmt: skip


def _draw(lanes: IterationLanes, label: str) -> Element:
    scale, height = _WIDTH / lanes.seconds, _HEIGHT * len(lanes.lanes)
    middle = {each.process: _HEIGHT * (at + 0.5) for at, each in enumerate(lanes.lanes)}
    drawn = [
        _tag(
            "rect",
            _tag("title", text=f"{each.process}: {each.what} {format_duration(each.end_s - each.begin_s)}"),
            x=scale * each.begin_s, width=scale * (each.end_s - each.begin_s), height=14,
            y=middle[each.process] - 7, class_=each.what,
        )
        for lane in lanes.lanes
        for each in lane.spans
    ]  # fmt: skip
    at = middle[lanes.path[0].process]
    for each in lanes.path:
        y = middle[each.process]
        line = f"M{scale * each.begin_s:.1f} {at:.0f}V{y:.0f}H{scale * each.end_s:.1f}"
        kind = "path-wait" if each.what.endswith("wait") else "path"
        words = f"{PARTS[each.what]}: {format_duration(each.end_s - each.begin_s)}"
        drawn.append(_tag("path", _tag("title", text=words), d=line, class_=kind))
        at = y
    return _tag(
        "svg", *drawn, viewBox=f"0 0 {_WIDTH} {height}", height=height, preserveAspectRatio="none",
        role="img", aria_label=label,
    )  # fmt: skip


def _swatch(kind: str) -> Element:
    drawn = (
        _tag("path", d="M0 7H14", class_=kind)
        if kind.startswith("path")
        else _tag("rect", width=14, height=14, class_=kind)
    )
    return _tag("svg", drawn, width=14, height=14, class_="lane-swatch", aria_hidden="true")


def _tag(name: str, *children: Element, text: str = "", **attributes: str | float) -> Element:
    known = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    texts = {
        key: printable(value) if isinstance(value, str) else f"{value:.1f}"
        for key, value in known.items()
    }
    made = Element(name, texts)
    made.text = printable(text)
    made.extend(children)
    return made
