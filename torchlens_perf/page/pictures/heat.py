"""The heat map of ranks and steps: how much more work each rank had than the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.quantities import steps_words
from torchlens_perf.page.pictures.frame import WIDTH, Frame, rect, svg, ticks, x_axis
from torchlens_perf.page.pictures.png import Colour, data_url
from torchlens_perf.view.markup import Child, Element, tag

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.page.contents import Columns, SlowTime

MAX_COLUMNS = 240
MAX_ROWS = 256
FULL_SCALE = 0.3  # share of more work that has the full colour
_LEVELS = 12  # of more, and as many of less
_NOTICED = 0.01  # less than that has no colour
_MORE, _LESS, _UNKNOWN = (213, 94, 0), (0, 114, 178), (128, 128, 128)  # told apart by all kinds of colour vision
_LEFT, _TOP, _ROW = 88.0, 8.0, 14.0
_FLAG_LETTERS = {"checkpoint": "S", "evaluation": "E", "compile": "C", "capture": "P"}


def palette() -> list[Colour]:
    """Nothing, then more work in rising opacity, less work, and not compared."""
    steps = [round(255 * (0.15 + 0.85 * (level + 1) / _LEVELS)) for level in range(_LEVELS)]
    return [(0, 0, 0, 0), *((*_MORE, each) for each in steps), *((*_LESS, each) for each in steps), (*_UNKNOWN, 70)]


def levels(excess: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Positions in the palette."""
    size = np.ceil(np.clip(np.abs(np.nan_to_num(excess)) / FULL_SCALE, 0, 1) * _LEVELS)
    found = np.where(excess > 0, size, size + _LEVELS)
    found[np.abs(np.nan_to_num(excess)) < _NOTICED] = 0
    found[~np.isfinite(excess)] = 2 * _LEVELS + 1
    return found.astype(np.uint8)


def grouped_rows(excess: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], int]:
    """At most MAX_ROWS rows: of neighbouring ranks the one that has most more work there; and how many are one row."""
    together = -(-len(excess) // MAX_ROWS)
    if together == 1:
        return excess, 1
    padded = np.pad(excess, ((0, -len(excess) % together), (0, 0)), constant_values=np.nan)
    groups = padded.reshape(-1, together, excess.shape[1])
    highest = np.where(np.isfinite(groups), groups, -np.inf).max(axis=1)
    return np.where(np.isfinite(highest), highest, np.nan), together


def heat_picture(
    excess: npt.NDArray[np.float64],
    ranks: Sequence[int],
    columns: Columns,
    slow: Sequence[SlowTime],
    description: str,
) -> Element:
    """excess: [ranks, columns] as shares; NaN where it was not compared. description: what is to be seen, in words."""
    rows, together = grouped_rows(excess)
    row_height = max(1.5, min(_ROW, 420 / len(rows)))
    first, width = columns["first_steps"][0], columns["width"]
    end = columns["first_steps"][-1] + width
    frame = Frame(_LEFT, _TOP, WIDTH - _LEFT - 12, row_height * len(rows), first, end)
    image = tag(
        "image",
        href=data_url(levels(rows), palette()),
        x=frame.left,
        y=frame.top,
        width=frame.width,
        height=frame.height,
        preserveAspectRatio="none",
        class_="cells",
    )
    marks: list[Child] = [image, rect(frame.left, frame.top, frame.width, frame.height, "outline")]
    every = max(1, round(16 / row_height))
    for row in range(0, len(rows), every):
        label = _rank_label(ranks[row * together : (row + 1) * together])
        y = frame.top + row_height * (row + 0.5) + 4
        marks.append(tag("text", label, x=frame.left - 7, y=y, text_anchor="end"))
    row_of = {rank: row // together for row, rank in enumerate(ranks)}
    for each in slow:
        if each["rank"] in row_of:
            begin = frame.x(max(each["since_step"], first))
            stop = frame.x(min(each["until_step"] or end, end))
            top = frame.top + row_height * row_of[each["rank"]]
            when = steps_words(each["since_step"], each["until_step"])
            words = f"rank {each['rank']} is slow in {each['phase']} {when}"
            marks.append(rect(begin, top, stop - begin, row_height, "slow", words))
    marks += flag_marks(columns, frame, frame.bottom + 44)
    marks.append(x_axis(frame, ticks(first, end), lambda step: f"{step:.0f}", "step"))
    return svg(WIDTH, frame.bottom + 62, "heat-picture", "Work of each rank beside the others", description, marks)


def _rank_label(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def flag_marks(columns: Columns, frame: Frame, y: float) -> list[Child]:
    """Letters below the axis for what steps did besides training; where they are too dense, every so many."""
    marks: list[Child] = []
    last_x = float("-inf")
    for step, flags in zip(columns["first_steps"], columns["flags"], strict=True):
        letters = "".join(_FLAG_LETTERS[flag] for flag in flags if flag in _FLAG_LETTERS)
        x = frame.x(step + columns["width"] / 2)
        if letters and x - last_x >= 9 * max(1, len(letters)):
            words = f"{', '.join(flag for flag in flags if flag in _FLAG_LETTERS)} at step {step}"
            marks.append(tag("text", letters, tag("title", words), x=x, y=y, text_anchor="middle", class_="flag"))
            last_x = x
    return marks


def flag_legend(columns: Columns) -> str:
    """What the letters mean that occur; "" where none does."""
    words = {
        "S": "saved a checkpoint",
        "E": "ran without gradients or evaluated",
        "C": "compiled",
        "P": "was captured",
    }
    found = {_FLAG_LETTERS[flag] for flags in columns["flags"] for flag in flags if flag in _FLAG_LETTERS}
    return ", ".join(f"{letter} {text}" for letter, text in words.items() if letter in found)


def legend() -> Element:
    """The scale in colours and words."""
    swatch, marks = 26.0, []
    shown: list[tuple[str, float]] = [("less", -FULL_SCALE), ("", -0.1), ("same", 0.0), ("3 %", 0.03), ("10 %", 0.1)]
    shown += [("20 %", 0.2), (f"{FULL_SCALE:.0%} more", FULL_SCALE), ("not compared", float("nan"))]
    for index, (label, value) in enumerate(shown):
        red, green, blue, alpha = palette()[int(levels(np.array([value]))[0])]
        x = 4 + index * 104
        box = tag(
            "rect", x=x, y=3, width=swatch, height=13, fill=f"rgb({red},{green},{blue})", fill_opacity=alpha / 255,
            class_="swatch",
        )  # fmt: skip
        marks += [box, tag("text", label, x=x + swatch + 6, y=14)]
    return tag("svg", marks, viewBox="0 0 860 20", class_="picture legend", aria_hidden="true")
