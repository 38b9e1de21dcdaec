"""What the grid shows of each rank: a letter that says all without colour, and a colour beside it. Pure.

A letter for what a rank is (named, died, ended), else for how much more work it has than the others, or for how long it
waits for them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens_perf.verdicts.words.hang import HangEvidence
from torchlens_perf.verdicts.words.order import ranks_of
from torchlens_perf.view.theme import EXCESS_BOUNDS, EXCESS_STYLES

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Rank, Report

EXCESS, WAIT = "excess", "wait"
VIEWS = (EXCESS, WAIT)
BLOCKING, SLOW, DIED, ENDED, MISSING, UNKNOWN = "H", "S", "D", "E", "?", "-"
_STATE_STYLES = {BLOCKING: "bold red", SLOW: "bold red", DIED: "bold magenta", ENDED: "dim", MISSING: "magenta"}
# How much it stands out by what it is, before any number.
_STANDING = {MISSING: 1, DIED: 2, SLOW: 3, BLOCKING: 4}
_MEANINGS = {
    BLOCKING: "others wait for it", SLOW: "slow", DIED: "died", ENDED: "ended", MISSING: "nothing heard",
}  # fmt: skip
_UNKNOWN_MEANS = {EXCESS: "not compared", WAIT: "not measured"}
ASCII_SHADES = ".:+%#"
_WAIT_BOUNDS = (0.1, 0.3, 0.5, 0.7)
_MAX_MISSING = 1 << 16  # ranks that are shown of which nothing is known: a damaged file may tell of any number


@dataclasses.dataclass(frozen=True)
class Cell:
    """One rank, or the rank of a node that stands out most."""

    rank: int
    letter: str
    style: str
    text: str
    """The number, as "+24%"; "" where there is none."""
    host: str
    weight: tuple[int, float]
    """How much it stands out: by what it is, then by the number."""
    ranks: tuple[int, ...] = ()
    """Of a node, all of its ranks."""

    @property
    def stands_out(self) -> bool:
        return self.weight[0] > 0 or self.weight[1] >= EXCESS_BOUNDS[-1]


def rank_cells(report: Report, view: str) -> list[Cell]:
    """A cell for each rank of the job, by rank; also for those that nothing is known of."""
    ranks = {rank["rank"]: rank for rank in report["ranks"]}
    excess = _newest_excess(report)
    slow, blocking = _named(report)
    cells = []
    for number in _numbers(report, ranks):
        rank = ranks.get(number)
        value = None
        if rank is not None:
            value = excess.get(number) if view == EXCESS else wait_share(rank)
        state = _state(number, rank, slow, blocking, live=report["run"]["live"])
        letter, style = (state, _STATE_STYLES[state]) if state else _shade(value, view)
        host = rank["host"] if rank is not None else ""
        text = (
            "" if value is None else f"{value:+.0%}" if view == EXCESS and abs(value) >= 0.005 else f"{abs(value):.0%}"
        )
        cells.append(Cell(number, letter, style, text, host, (_STANDING.get(state, 0), value or 0.0)))
    return cells


def node_cells(cells: Sequence[Cell]) -> list[Cell]:
    """A cell for each node, in the order of their first ranks: its rank that stands out most."""
    by_host: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_host[cell.host].append(cell)
    return [
        dataclasses.replace(max(of_node, key=lambda cell: cell.weight), ranks=tuple(cell.rank for cell in of_node))
        for of_node in by_host.values()
    ]


def legend(cells: Sequence[Cell], view: str) -> str:
    """What the letters mean that are there."""
    seen = {cell.letter for cell in cells}
    if view == WAIT:
        scale = "0-9: tenths of its step that it waits in communication"
    else:
        shades = zip(ASCII_SHADES[1:], EXCESS_BOUNDS, strict=True)
        scale = f"{ASCII_SHADES[0]} below {EXCESS_BOUNDS[0]:.0%}, "
        scale += ", ".join(f"{shade} {bound:.0%}" for shade, bound in shades) + " more work than the others"
    letters = [letter for letter in (*_MEANINGS, UNKNOWN) if letter in seen]
    return "; ".join([scale, *(f"{letter} {meaning(letter, view)}" for letter in letters)])


def meaning(letter: str, view: str) -> str:
    """Of a cell's letter; "" for one that only says how much."""
    return _UNKNOWN_MEANS[view] if letter == UNKNOWN else _MEANINGS.get(letter, "")


def window_steps(report: Report) -> int | None:
    """How many steps the excess is the mean of."""
    return report["heat"]["width"] if report["heat"] is not None else None


def _numbers(report: Report, ranks: dict[int, Rank]) -> list[int]:
    world_size = report["run"]["world_size"]
    return sorted({*ranks, *range(min(world_size, _MAX_MISSING) if world_size > 0 else 0)})


def _newest_excess(report: Report) -> dict[int, float]:
    """By rank, in the newest window of which there is one: the last one of a run may have too few steps."""
    heat, found = report["heat"], {}
    for rank in heat["ranks"] if heat is not None else ():
        newest = next((value for value in rank["excess"][:-3:-1] if value is not None), None)
        if newest is not None:
            found[rank["rank"]] = newest
    return found


def _named(report: Report) -> tuple[set[int], set[int]]:
    """Ranks that are slow now, and ranks that others wait for in a hang."""
    slow: set[int] = set()
    blocking: set[int] = set()
    for verdict in report["verdicts"]:
        evidence = verdict["evidence"]
        if verdict["kind"] == "straggler":
            slow.update(ranks_of(verdict))
        elif isinstance(evidence, HangEvidence):
            blocking |= set(evidence.ranks)
    return slow, blocking


def wait_share(rank: Rank) -> float | None:
    """How much of its typical step a rank is blocked in communication, by the clock that it is judged by."""
    device = rank["device"]
    if device is not None and device["parts"]:
        total = sum(device["parts"].values())
        return device["parts"].get("communication", 0.0) / total if total else None
    if rank["typical"] is None or "communication" in rank["not_measured"]:
        return None
    phase = rank["phases"].get("communication")
    return phase["share"] if phase is not None else 0.0


def _state(number: int, rank: Rank | None, slow: set[int], blocking: set[int], *, live: bool) -> str:
    """A letter that says more than a number; "" for a rank that does what it should."""
    if number in blocking:
        return BLOCKING
    if rank is None:
        return MISSING
    if rank["state"] == "died":
        return DIED
    if number in slow:
        return SLOW
    return ENDED if live and rank["state"] == "closed" else ""


def _shade(value: float | None, view: str) -> tuple[str, str]:
    if value is None:
        return UNKNOWN, "dim"
    if view == WAIT:
        level = sum(value >= bound for bound in _WAIT_BOUNDS)
        return str(min(9, max(0, int(value * 10)))), EXCESS_STYLES[level]
    level = sum(value >= bound for bound in EXCESS_BOUNDS)
    return ASCII_SHADES[level], EXCESS_STYLES[level]
