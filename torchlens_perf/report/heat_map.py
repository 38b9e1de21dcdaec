"""The heat map of ranks and steps: where in the run which rank had more work than the others, in a terminal or as text.

One character for each rank and window; it grows darker with the excess, and has a colour where there are any.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console, ConsoleOptions
from rich.text import Text

from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.stragglers.window_excess import window_excess

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.run_windows import RunWindows
    from torchlens_perf.verdicts.words.report import Heat, HeatRank

_TAGS = {
    "checkpoint": Flag.CHECKPOINT, "evaluation": Flag.EVALUATION, "compile": Flag.COMPILED, "capture": Flag.CAPTURED,
}  # fmt: skip


def heat(windows: RunWindows | None, findings: Findings, places: Mapping[int, Placement]) -> Heat | None:
    """The report's `heat`: its windows, the same for all ranks. None if there is nobody to compare, or if devices
    hide what their hosts do: a rank that waits for others then has little work by its device's clock.

    `excess` is a rank's work in a window, above the median of the other ranks that do the same, as a share of that
    median; null where it, or all others, have no work there that can be compared. `slow` holds since and until which
    step it was a straggler, null for still. `tags` has for each window what else any rank did in it.
    """
    if windows is None or any(each.own and each.own.is_hidden for each in findings.usual):
        return None
    populations = [places[rank].population if rank in places else "" for rank in windows.ranks]
    if len(set(populations)) == len(populations):
        return None
    excess = window_excess(windows, places)
    rounded = [[round(value, 4) if value == value else None for value in values] for values in excess.tolist()]
    slow = defaultdict(list)
    for episode in sorted(findings.episodes, key=lambda episode: episode.since_step):
        slow[episode.rank].append([episode.since_step, episode.until_step])
    return {
        "width": windows.width,
        "first_steps": windows.first_steps.tolist(),
        "tags": [[name for name, flag in _TAGS.items() if found & flag] for found in windows.tags],
        "ranks": [
            {"rank": rank, "excess": row, "slow": slow[rank]} for rank, row in zip(windows.ranks, rounded, strict=True)
        ],
    }


_T = TypeVar("_T")

MAX_RANKS = 16
_TYPICAL_RANKS = 4  # of those, where there are more: what the slow ones are to be laid beside
_MIN_COLUMNS, _WIDEST_CELL = 4, 3
BOUNDS = (0.03, 0.06, 0.12, 0.25)
"""Of the excess, as a share of the others' work: from where on a cell is one darker."""
_SHADES, ASCII_SHADES = "·░▒▓█", ".:+%#"
SHADE_STYLES = ("dim", "", "yellow", "red", "bold red")
_TAG_LETTERS = {"checkpoint": "S", "evaluation": "E", "compile": "C", "capture": "P"}
_TAG_WORDS = {
    "S": "saved a checkpoint",
    "E": "ran without gradients or evaluated",
    "C": "compiled",
    "P": "was captured",
}


class HeatMap:
    """A rich renderable of report["heat"]; nothing where there is too little to see."""

    def __init__(self, heat: Heat | None) -> None:
        self._heat = heat

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        heat = self._heat
        if heat is None or len(heat["first_steps"]) < _MIN_COLUMNS:
            return
        ranks = chosen(heat["ranks"])
        label = max(len(f"rank {rank['rank']} ") for rank in ranks)
        room = options.max_width - label - 2
        if room < _MIN_COLUMNS:
            return
        for line in _Picture(heat, ranks, label, room, ascii_only=options.ascii_only).lines():
            line.no_wrap, line.overflow = True, "crop"
            yield line
        shades = ASCII_SHADES if options.ascii_only else _SHADES
        yield Text(_legend(heat, ranks, shades), style="italic dim")
        yield Text("")


def chosen(ranks: Sequence[HeatRank]) -> list[HeatRank]:
    """At most MAX_RANKS of these ranks: the slow ones, those with most excess, and typical ones."""
    if len(ranks) <= MAX_RANKS:
        return list(ranks)
    means = {rank["rank"]: _mean(rank["excess"]) for rank in ranks}
    by_slowness = sorted(
        ranks,
        key=lambda rank: (
            not any(until is None for _, until in rank["slow"]),
            not rank["slow"],
            -means[rank["rank"]],
            rank["rank"],
        ),
    )
    slow, others = by_slowness[: MAX_RANKS - _TYPICAL_RANKS], by_slowness[MAX_RANKS - _TYPICAL_RANKS :]
    usual = statistics.median(means[rank["rank"]] for rank in others)
    typical = sorted(others, key=lambda rank: (abs(means[rank["rank"]] - usual), rank["rank"]))[:_TYPICAL_RANKS]
    return sorted([*slow, *typical], key=lambda rank: rank["rank"])


def _mean(excess: Iterable[float | None]) -> float:
    present = [value for value in excess if value is not None]
    return sum(present) / len(present) if present else 0.0


class _Picture:
    """The lines of a heat map that is as wide as there is room."""

    def __init__(self, heat: Heat, ranks: Sequence[HeatRank], label: int, room: int, *, ascii_only: bool) -> None:
        first_steps = heat["first_steps"]
        self._ranks, self._label = ranks, label
        self._together = -(-len(first_steps) // room)  # windows in one column
        self._steps = first_steps[:: self._together]
        self._columns = len(self._steps)
        self._cell = max(1, min(_WIDEST_CELL, min(room, 64) // self._columns))
        self._tags = [sorted(set().union(*group)) for group in self._grouped(heat["tags"])]
        self._column_steps = heat["width"] * self._together
        self._shades = ASCII_SHADES if ascii_only else _SHADES
        self._frame = "|" if ascii_only else "│"
        self._bar = tuple("`-'>" if ascii_only else "└─┘>")

    def _grouped(self, values: Sequence[_T]) -> list[Sequence[_T]]:
        return [values[index : index + self._together] for index in range(0, len(values), self._together)]

    def lines(self) -> Iterator[Text]:
        yield Text("each rank's work above that of the others, over the run", style="bold")
        for rank in self._ranks:
            line = Text(f"rank {rank['rank']:>{self._label - 6}} {self._frame}")
            levels = (_level(group) for group in self._grouped(rank["excess"]))
            for level, cells in itertools.groupby(levels):  # one escape sequence for each run of cells
                shade, style = (self._shades[level], SHADE_STYLES[level]) if level is not None else (" ", "")
                line.append(shade * self._cell * len(list(cells)), style=style)
            line.append(self._frame)
            yield line
            if rank["slow"]:
                yield Text(" " * (self._label + 1)).append(self._episodes(rank["slow"]), style="red")
        if any(self._tags):
            letters = (_letter(tags) * (1 if tags else self._cell) for tags in self._tags)
            below = "".join(letter.ljust(self._cell) for letter in letters)
            yield Text(" " * (self._label + 1) + below.rstrip())
        yield Text("step".rjust(self._label - 1) + "  " + self._axis(), style="dim")

    def _episodes(self, slow: Sequence[Sequence[int | None]]) -> str:
        """A bar below the cells of each time in which the rank was a straggler, with its steps where there is room."""
        width = self._columns * self._cell
        line = [" "] * width
        begin_mark, middle, end_mark, still = self._bar
        places = []
        for since, until in slow:
            assert since is not None, "it may still last, but it has begun"
            begin = self._column(since) * self._cell
            end = width if until is None else min(width, (self._column(until - 1) + 1) * self._cell)
            bar = [begin_mark, *middle * (end - begin - 2), end_mark if until is not None else still]
            line[begin:end] = bar[: end - begin]
            places.append((begin, end, f"since {since}" if until is None else f"{since} to {until - 1}"))
        for begin, end, steps in places:
            for caption in (f" slow {steps} ", f" {steps} "):
                at = next((at for at in (end, begin - len(caption)) if _free(line, at, len(caption))), None)
                if at is None and len(caption) <= end - begin - 2:
                    at = begin + 1
                if at is not None:
                    line[at : at + len(caption)] = caption
                    break
        return "".join(line).rstrip()

    def _column(self, step: int) -> int:
        return min(self._columns - 1, max(0, (step - self._steps[0]) // self._column_steps))

    def _axis(self) -> str:
        """The first step of every so many columns."""
        longest = len(str(self._steps[-1]))
        every = 1
        while every * self._cell < longest + 3:
            every *= 2
        line = ""
        for column in range(0, self._columns, every):
            at, number = column * self._cell, str(self._steps[column])
            if at + len(number) <= self._columns * self._cell + 1 or not line:  # none that is cut off
                line = line.ljust(at) + number
        return line


def _free(line: Sequence[str], at: int, length: int) -> bool:
    return at >= 0 and at + length <= len(line) and not "".join(line[at : at + length]).strip()


def _level(excess: Sequence[float | None]) -> int | None:
    """How dark a cell is; None for blank."""
    present = [value for value in excess if value is not None]
    return sum(_mean(present) >= bound for bound in BOUNDS) if present else None


def _letter(tags: Sequence[str]) -> str:
    return "*" if len(tags) > 1 else _TAG_LETTERS[tags[0]] if tags else " "


def _legend(heat: Heat, ranks: Sequence[HeatRank], shades: str) -> str:
    scale = f"{shades[0]} below {BOUNDS[0]:.0%}"
    scale += "".join(f"  {shade} {bound:.0%}" for shade, bound in zip(shades[1:], BOUNDS, strict=True))
    parts = [f"{scale} and more above the median of the others"]
    excess = [value for rank in ranks for value in rank["excess"]]
    if None in excess:
        parts.append("blank: nothing to compare")
    found = {_TAG_LETTERS[tag] for tags in heat["tags"] for tag in tags}
    if found:
        words = [f"{letter} {word}" for letter, word in _TAG_WORDS.items() if letter in found]
        parts.append(", ".join(words if len(found) == 1 else [*words, "* several of these"]))
    if len(ranks) < len(heat["ranks"]):
        slow = MAX_RANKS - _TYPICAL_RANKS
        parts.append(
            f"{len(ranks)} of {len(heat['ranks'])} ranks: the {slow} that stand out most and {_TYPICAL_RANKS} typical "
            "ones; --json has all"
        )
    return "; ".join(parts)
