"""The heat map: what it says of ranks and windows made by hand, and how it looks in a terminal and out of one."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.support.findings import episode, findings
from tests.support.tables import step_table
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS, WindowHistory, Windows
from torchlens_perf.analysis.statistics.run_windows import MAX_COLUMNS, RunWindows, run_windows
from torchlens_perf.report.heat_map import MAX_RANKS, HeatMap, chosen, heat
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings
from torchlens_perf.verdicts.stragglers.placement import Placement


def windows(
    steps: int, *, extra_ms: float = 0.0, since: int = 0, until: int = 1 << 30, every: int = 1, first: int = 0,
    tags: dict[int, Flag] | None = None,
) -> Windows:  # fmt: skip
    """A rank's steps of 100 ms of work, and more of it in one of `every` steps from `since` to `until`."""
    numbers = range(first, first + steps)
    slow = [since <= step < until and step % every == 0 for step in numbers]
    table = step_table([{"forward": 100 + extra_ms * each, "communication": 50} for each in slow], first_step=first)
    flags = np.array([int((tags or {}).get(step, 0)) for step in numbers])
    history = WindowHistory()
    history.add(dataclasses.replace(table, flags=flags))
    return history.windows()


def on_one_grid(*ranks: Windows) -> RunWindows | None:
    return run_windows(dict(enumerate(ranks)), max((int(each.first_step[-1]) for each in ranks), default=0))


def of(ranks: list[Windows], found: Findings = NOTHING, populations: str = "") -> dict[str, Any]:
    """The heat of these ranks; populations: a letter for each."""
    places = {rank: Placement("node", letter) for rank, letter in enumerate(populations)}
    value = heat(on_one_grid(*ranks), found, places)
    assert value is not None
    assert value == json.loads(json.dumps(value, allow_nan=False))
    return value


def excess(value: dict[str, Any], rank: int) -> list[float | None]:
    found: list[float | None] = value["ranks"][rank]["excess"]
    return found


def picture(value: dict[str, Any] | None, columns: int = 100, **settings: Any) -> list[str]:
    """The lines of the heat map in plain text."""
    file = io.StringIO()
    Console(file=file, width=columns, color_system=None, **settings).print(HeatMap(value))
    return file.getvalue().splitlines()


def words(lines: list[str]) -> str:
    """The lines as one, wherever they are broken."""
    return " ".join(" ".join(lines).split())


def cells(line: str) -> str:
    """What is between a line's frames."""
    return line.split("│")[1]


# -- the values


def test_excess_is_a_share_of_the_other_ranks_work() -> None:
    """A rank with a quarter more work than the others is at 0.25 from that window on; the others stay at 0."""
    value = of([windows(64), windows(64, extra_ms=25, since=32), windows(64), windows(64)])

    assert (value["width"], value["first_steps"]) == (8, list(range(0, 64, 8)))
    assert excess(value, 1) == [0.0] * 4 + [0.25] * 4
    assert all(excess(value, rank) == [0.0] * 8 for rank in (0, 2, 3))


def test_one_of_two_is_compared_with_the_other() -> None:
    """Of two ranks the slow one has all of the excess: their median would hide half of it."""
    value = of([windows(40), windows(40, extra_ms=50)])
    assert excess(value, 1) == [0.5] * 5
    assert excess(value, 0) == [-0.3333] * 5


def test_slowness_in_some_steps_is_seen() -> None:
    """A rank that is slow in one step of four is above the others: a median over a window would not show it."""
    value = of([windows(64), windows(64, extra_ms=40, every=4), windows(64)])
    assert excess(value, 1)[1:] == [0.1] * 7


def test_ranks_that_do_other_work_are_not_compared() -> None:
    """Ranks are compared within their population; one that is alone there has no excess."""
    ranks = [windows(40), windows(40), windows(40, extra_ms=100), windows(40, extra_ms=100), windows(40, extra_ms=500)]
    value = of(ranks, populations="aabbc")

    assert [excess(value, rank) for rank in range(4)] == [[0.0] * 5] * 4
    assert excess(value, 4) == [None] * 5
    alone = on_one_grid(windows(40), windows(40))
    assert heat(alone, NOTHING, {0: Placement("", "a"), 1: Placement("", "b")}) is None
    assert heat(on_one_grid(windows(40)), NOTHING, {}) is None
    assert heat(on_one_grid(), NOTHING, {}) is None


def test_missing_is_not_zero() -> None:
    """A window in which a rank was not seen, or nobody else was, has no value."""
    value = of([windows(32), windows(64), windows(24, first=40)])
    assert [[each is None for each in excess(value, rank)] for rank in range(3)] == [
        [False] * 4 + [True] * 4,
        [False] * 4 + [True] + [False] * 3,
        [True] * 5 + [False] * 3,
    ]


def test_columns_do_not_grow_with_the_run() -> None:
    """A long run has at most 64 columns, of whole windows of all ranks, whatever their widths; sums stay right."""
    short, long = windows(9000, extra_ms=20, since=4096), windows(20_000)
    value = of([short, long, windows(20_000)])

    assert short.width < long.width
    assert MAX_COLUMNS / 2 < len(value["first_steps"]) <= MAX_COLUMNS
    assert all(first % value["width"] == 0 for first in value["first_steps"])
    before = 4096 // value["width"]
    known = [each for each in excess(value, 0) if each is not None]
    assert set(known[:before]) == {0.0}
    assert set(known[before:]) == {0.2}
    assert len(known) < len(excess(value, 0))


def test_tags_and_slow_times_are_there() -> None:
    """Tags are those of any rank; a rank's slow times are its episodes, ended ones with their end."""
    tags = {9: Flag.CHECKPOINT, 17: Flag.COMPILED | Flag.EVALUATION}
    found = findings(episode(1, 40), episode(1, 8, 20), episode(7, 3))
    value = of([windows(64, tags=tags), windows(64, tags={25: Flag.EVALUATION})], found)

    assert value["tags"] == [[], ["checkpoint"], ["evaluation", "compile"], ["evaluation"], [], [], [], []]
    assert [rank["slow"] for rank in value["ranks"]] == [[], [[8, 20], [40, None]]]


def test_warm_up_is_not_compared() -> None:
    """The first steps, which are slow for reasons of their own, are not in the first window."""
    value = of([windows(40), windows(40, extra_ms=900, until=WARM_UP_STEPS)])
    assert excess(value, 1)[0] == 0.0


# -- the picture


def test_shades_grow_with_the_excess() -> None:
    """Each step of the scale has its character; a window without a value is blank, one without excess is not."""
    ranks = [
        {"rank": 0, "excess": [-0.5, 0.0, 0.029, 0.03, 0.059, 0.06, 0.119, 0.12, 0.249, 0.25, 9.0, None], "slow": []}
    ]
    value = {"width": 8, "first_steps": list(range(0, 96, 8)), "tags": [[]] * 12, "ranks": ranks}
    lines = picture(value, columns=21)

    assert cells(lines[1]) == "···░░▒▒▓▓██ "
    assert "blank: nothing to compare" in words(picture(value))


@pytest.mark.parametrize("columns", [30, 40, 80, 118, 200])
@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_fits_the_terminal(columns: int, ranks: int) -> None:
    """No line is wider than the terminal, all frames stand below each other, and no more than 16 ranks are shown."""
    slow = [windows(1000, extra_ms=30, since=500)]
    lines = picture(of([*slow, *([windows(1000)] * (ranks - 1))], findings(episode(0, 500))), columns)
    framed = [line for line in lines if "│" in line]

    assert max(map(len, lines)) <= columns
    assert len(framed) == min(ranks, MAX_RANKS)
    assert len({tuple(at for at, letter in enumerate(line) if letter == "│") for line in framed}) == 1
    row = cells(framed[0])
    assert row == "".join(sorted(row, key="·░▒▓█".index))
    assert 0.8 < row.count("·") / row.count("█") < 1.2


def test_few_windows_have_wide_cells() -> None:
    """A short run is drawn with wider cells; below four windows it is not drawn."""
    assert cells(picture(of([windows(64), windows(64, extra_ms=30, since=32)]))[2]) == "·" * 12 + "█" * 12
    assert picture(of([windows(24), windows(24, extra_ms=30)])) == []
    assert picture(None) == []


def test_bar_marks_when_a_rank_was_slow() -> None:
    """Below a rank a bar goes from the window in which it became slow to the last slow one, and tells the steps."""
    found = findings(episode(1, 100, 200), episode(1, 400))
    lines = picture(of([windows(512), windows(512, extra_ms=30, since=100, until=200)], found))
    below = lines[3][len("rank 1 │") :]

    assert below.index("└") == 100 // 8
    assert below.index("┘ slow 100 to 199 ") == 199 // 8
    assert below.rindex("└") == 400 // 8
    assert below.endswith(">")
    assert len(below) == 512 // 8
    assert "└ since 400 " in below  # where there is no room for more
    assert "└" not in lines[1] + lines[2]


def test_bar_of_one_window_is_not_lost() -> None:
    """An episode that is shorter than a window, also at the very end, still has a mark."""
    found = findings(episode(0, 24, 26), episode(1, 511))
    lines = picture(of([windows(512), windows(512)], found))
    assert [lines[2][len("rank 0 │") :][3], lines[4].rstrip()[-1]] == ["└", "└"]


def test_tags_stand_below_their_window() -> None:
    """Letters tell what else was done in a window, a star that it was several things; the legend says which."""
    tags = {16: Flag.CHECKPOINT, 64: Flag.EVALUATION, 65: Flag.CHECKPOINT}
    lines = picture(of([windows(512, tags=tags), windows(512)]))

    assert lines[3] == " " * len("rank 0 │") + "  S     *"
    assert "S saved a checkpoint, E ran without gradients or evaluated, * several of these" in words(lines)
    assert "several" not in words(picture(of([windows(512, tags={16: Flag.COMPILED}), windows(512)])))


def test_axis_tells_first_steps() -> None:
    """Each number on the axis is the first step of the window that it stands below; they are evenly spaced."""
    (axis,) = [line for line in picture(of([windows(512, first=4096), windows(512, first=4096)])) if "step" in line]
    numbers = axis[len("rank 0 │") :]
    assert numbers.split() == [str(4096 + 64 * index) for index in range(8)]
    assert all(numbers.index(number) == (int(number) - 4096) // 8 for number in numbers.split())


def test_no_number_of_the_axis_is_cut_off() -> None:
    """In a narrow terminal every number on the axis is still the first step of a window."""
    value = of([windows(500, first=1_000_000), windows(500, first=1_000_000)])
    for columns in range(20, 60):
        (axis,) = [line for line in picture(value, columns) if "step" in line]
        assert {int(number) for number in axis.split()[1:]} <= set(value["first_steps"])


def test_colours_where_there_are_any() -> None:
    """In a terminal with colours dark cells are red; NO_COLOR leaves the characters."""
    value = of([windows(64), windows(64, extra_ms=30)])
    coloured, plain = io.StringIO(), io.StringIO()
    Console(file=coloured, width=80, force_terminal=True, color_system="standard").print(HeatMap(value))
    Console(file=plain, width=80, force_terminal=True, color_system="standard", no_color=True).print(HeatMap(value))

    assert "\x1b[1;31m█" in coloured.getvalue()
    assert "31m" not in plain.getvalue()
    assert "█" * 24 in plain.getvalue()


def test_plain_ascii() -> None:
    """Where the output cannot hold shades, letters that every encoding has stand for them."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    value = of([windows(64), windows(64, extra_ms=30, since=32)], findings(episode(1, 32)))
    Console(file=file, width=80, color_system=None).print(HeatMap(value))
    file.seek(0)
    text = file.read()
    assert "rank 1 |............############|" in text
    assert "`" in text


def test_of_many_ranks_the_slow_ones_and_typical_ones_are_shown() -> None:
    """Ranks that are slow come first, then those that were, then those with most excess; four typical ones stay."""

    def rank(number: int, mean: float, slow: list[list[int | None]] | None = None) -> dict[str, Any]:
        return {"rank": number, "excess": [mean, None, mean], "slow": slow or []}

    ranks = [rank(number, number / 10_000) for number in range(100)]
    ranks[3], ranks[4] = rank(3, 0.0, [[5, None]]), rank(4, 0.0, [[5, 9]])
    shown = [each["rank"] for each in chosen(ranks)]

    assert len(shown) == MAX_RANKS
    assert shown[:2] == [3, 4]
    assert shown[-10:] == list(range(90, 100))
    assert all(40 <= number <= 50 for number in shown[2:6])
    value = {"width": 8, "first_steps": [0, 8, 16, 24], "tags": [[]] * 4, "ranks": ranks}
    assert "16 of 100 ranks: the 12 that stand out most and 4 typical ones" in words(picture(value))
    assert chosen(ranks[:MAX_RANKS]) == ranks[:MAX_RANKS]
