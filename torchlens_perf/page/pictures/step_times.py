"""Step times over the run: quantiles of all ranks' steps, with what happened meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.quantities import duration
from torchlens_perf.page.pictures.frame import WIDTH, Frame, band, line, rect, svg, ticks, x_axis, y_axis
from torchlens_perf.page.pictures.heat import flag_marks
from torchlens_perf.view.markup import Child, Element, tag

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Columns, SlowTime, StepBands

MAX_COLUMNS = 420
_LEFT, _TOP, _HEIGHT = 88.0, 26.0, 210.0
_USUAL = 0.98  # share of the columns whose band has room
_HEADROOM = 1.6  # times the longest of those: longer steps are marked at the top


def step_times_picture(columns: Columns, bands: StepBands, slow: Sequence[SlowTime], description: str) -> Element:
    """columns, bands: with as many columns as there are points to draw. description: what is to be seen, in words."""
    first, width = columns["first_steps"][0], columns["width"]
    end = columns["first_steps"][-1] + width
    numbers = {name: np.array([np.nan if each is None else each for each in bands[name]]) for name in bands}  # type: ignore[literal-required]
    usual = float(np.nanquantile(numbers["p95_s"], _USUAL))  # a few very long steps would flatten all others
    highest = float(np.nanmax(numbers["max_s"]))
    top_s = min(highest, _HEADROOM * usual) * 1.05
    frame = Frame(_LEFT, _TOP, WIDTH - _LEFT - 12, _HEIGHT, first, end, 0.0, top_s)
    xs = [frame.x(step + width / 2) for step in columns["first_steps"]]

    def at(name: str) -> list[float]:
        return [frame.y(min(value, top_s)) for value in numbers[name].tolist()]

    marks: list[Child] = [y_axis(frame, ticks(0, top_s, 5), duration)]
    for index, each in enumerate(slow):
        begin, stop = frame.x(max(each["since_step"], first)), frame.x(min(each["until_step"] or end, end))
        words = f"rank {each['rank']} is slow in {each['phase']}"
        marks.append(rect(begin, frame.top, stop - begin, frame.height, "slow-time", words))
        if index < 4:
            y = frame.top - 6 + 18 * (index % 2)
            marks.append(tag("text", f"rank {each['rank']} slow", x=begin + 3, y=y, class_="slow-label"))
    marks.append(tag("path", d=band(list(zip(xs, at("p5_s"), at("p95_s"), strict=True))), class_="band"))
    marks.append(tag("path", d=line(list(zip(xs, at("max_s"), strict=True))), class_="thin"))
    marks.append(tag("path", d=line(list(zip(xs, at("p50_s"), strict=True))), class_="median"))
    beyond = [(x, value) for x, value in zip(xs, numbers["max_s"].tolist(), strict=True) if value > top_s]
    for x, value in sorted(beyond, key=lambda each: -each[1])[:40]:
        title = tag("title", f"longest step here: {duration(value)}")
        marks.append(tag("path", title, d=f"M{x - 4:.1f} {frame.top + 7:.1f}h8l-4 -7Z", class_="beyond"))
    marks += flag_marks(columns, frame, frame.bottom + 44)
    marks.append(x_axis(frame, ticks(first, end), lambda step: f"{step:.0f}", "step"))
    return svg(WIDTH, frame.bottom + 56, "steps-picture", "Step times over the run", description, marks)
