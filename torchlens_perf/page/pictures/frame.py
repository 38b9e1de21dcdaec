"""A picture's frame: scales, ticks and axes. Sizes are in units of the view box; CSS scales it to the page. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from torchlens_perf.view.markup import Child, Element, tag

WIDTH = 960.0
_TICK = 4.0


@dataclasses.dataclass(frozen=True)
class Frame:
    """Where data lie in the picture: x from x0 to x1, y from y0 (below) to y1 (above)."""

    left: float
    top: float
    width: float
    height: float
    x0: float
    x1: float
    y0: float = 0.0
    y1: float = 1.0

    def x(self, value: float) -> float:
        return self.left + self.width * (value - self.x0) / ((self.x1 - self.x0) or 1.0)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - (value - self.y0) / ((self.y1 - self.y0) or 1.0))

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def right(self) -> float:
        return self.left + self.width


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round values between the two, some `about` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def x_axis(frame: Frame, values: Iterable[float], show: Callable[[float], str], label: str) -> Element:
    marks: list[Child] = [tag("path", d=f"M{frame.left:.1f} {frame.bottom:.1f}H{frame.right:.1f}", class_="axis")]
    for value in values:
        x = frame.x(value)
        marks.append(tag("path", d=f"M{x:.1f} {frame.bottom:.1f}v{_TICK:g}", class_="axis"))
        marks.append(tag("text", show(value) if value else "0", x=x, y=frame.bottom + 17, text_anchor="middle"))
    marks.append(tag("text", label, x=frame.right, y=frame.bottom + 33, text_anchor="end", class_="label"))
    return tag("g", marks, aria_hidden="true")


def y_axis(frame: Frame, values: Iterable[float], show: Callable[[float], str]) -> Element:
    """With lines across the picture."""
    marks: list[Child] = []
    for value in values:
        y = frame.y(value)
        marks.append(tag("path", d=f"M{frame.left:.1f} {y:.1f}H{frame.right:.1f}", class_="grid"))
        marks.append(tag("text", show(value) if value else "0", x=frame.left - 7, y=y + 4, text_anchor="end"))
    return tag("g", marks, aria_hidden="true")


def svg(width: float, height: float, key: str, title: str, description: str, *children: Child) -> Element:
    """A picture with its words for who cannot see it. key: unique in the page."""
    return tag(
        "svg",
        _with_id(tag("title", title), f"{key}-title"),
        _with_id(tag("desc", description), f"{key}-desc"),
        *children,
        viewBox=f"0 0 {width:g} {height:g}",
        class_="picture",
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
    )


def _with_id(element: Element, key: str) -> Element:
    element.set("id", key)
    return element


def line(points: Sequence[tuple[float, float | None]]) -> str:
    """A path through points; it is interrupted where there is none."""
    parts, drawn = [], False
    for x, y in points:
        if y is None or y != y:
            drawn = False
            continue
        parts.append(f"{'L' if drawn else 'M'}{x:.1f} {y:.1f}")
        drawn = True
    return "".join(parts)


def band(points: Sequence[tuple[float, float | None, float | None]]) -> str:
    """A closed path between a lower and an upper line, a piece for each stretch that is known."""
    parts: list[str] = []
    piece: list[tuple[float, float, float]] = []
    for x, low, high in [*points, (0.0, None, None)]:
        if low is not None and high is not None and low == low and high == high:
            piece.append((x, low, high))
        elif piece:
            forth = "L".join(f"{x:.1f} {high:.1f}" for x, _, high in piece)
            back = "L".join(f"{x:.1f} {low:.1f}" for x, low, _ in reversed(piece))
            parts.append(f"M{forth}L{back}Z")
            piece = []
    return "".join(parts)


def rect(x: float, y: float, width: float, height: float, look: str, title: str | None = None) -> Element:
    return tag(
        "rect",
        tag("title", title) if title is not None else None,
        x=round(x, 2),
        y=round(y, 2),
        width=round(max(width, 0.3), 2),
        height=round(height, 2),
        class_=look,
    )
