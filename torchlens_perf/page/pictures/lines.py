"""Small pictures of one quantity over time, for several ranks, GPUs or ports. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchlens_perf.page.pictures.frame import WIDTH, Frame, line, svg, ticks, x_axis, y_axis
from torchlens_perf.view.markup import Child, Element, tag

_LEFT, _TOP, _HEIGHT = 88.0, 8.0, 96.0


class Line(NamedTuple):
    """One line; marked: it stands out."""

    label: str
    points: Sequence[tuple[float, float | None]]
    marked: bool


def lines_picture(
    key: str, title: str, lines: Sequence[Line], show: Callable[[float], str], x_label: str, description: str
) -> Element:
    """show: a value in words, for the axis. description: what is to be seen, in words."""
    xs = [x for each in lines for x, _ in each.points]
    ys = [y for each in lines for _, y in each.points if y is not None]
    low, high = min(0.0, min(ys, default=0.0)), max(ys, default=1.0)
    frame = Frame(
        _LEFT, _TOP, WIDTH - _LEFT - 12, _HEIGHT, min(xs, default=0.0), max(xs, default=1.0), low, high or 1.0
    )
    marks: list[Child] = [y_axis(frame, ticks(low, high or 1.0, 3), show)]
    for each in sorted(lines, key=lambda one: one.marked):  # what stands out lies above the others
        points = [(frame.x(x), None if y is None else frame.y(y)) for x, y in each.points]
        look = "line marked" if each.marked else "line"
        marks.append(tag("path", tag("title", each.label), d=line(points), class_=look))
    marks.append(x_axis(frame, ticks(frame.x0, frame.x1), lambda x: f"{x:g}", x_label))
    return svg(WIDTH, frame.bottom + 38, key, title, description, marks)
