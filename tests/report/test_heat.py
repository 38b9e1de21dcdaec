"""The numbers of the heat map, for ranks and windows defined by the tests."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from tests.support.findings import episode, findings
from tests.support.tables import step_table
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS, WindowHistory, Windows
from torchlens_perf.analysis.statistics.run_windows import MAX_COLUMNS, RunWindows, align_windows
from torchlens_perf.report.heat import build_heat_map
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings
from torchlens_perf.verdicts.stragglers.placement import Placement


def windows(
    steps: int, *, extra_ms: float = 0.0, since: int = 0, until: int = 1 << 30, every: int = 1, first: int = 0,
    tags: dict[int, Flag] | None = None,
) -> Windows:  # fmt: skip
    """Return a rank's steps of 100 ms of work, with more in one of `every` steps from `since` to
    `until`.
    """
    numbers = range(first, first + steps)
    slow = [since <= step < until and step % every == 0 for step in numbers]
    table = step_table(
        [{"forward": 100 + extra_ms * each, "communication": 50} for each in slow], first_step=first
    )
    flags = np.array([int((tags or {}).get(step, 0)) for step in numbers])
    history = WindowHistory()
    history.add_steps(dataclasses.replace(table, flags=flags))
    return history.to_windows()


def on_one_grid(*ranks: Windows) -> RunWindows | None:
    return align_windows(
        dict(enumerate(ranks)), max((int(each.first_step[-1]) for each in ranks), default=0)
    )


def of(ranks: list[Windows], found: Findings = NOTHING, populations: str = "") -> dict[str, Any]:
    """Return the heat map of the given ranks.

    `populations` has a letter for each rank.
    """
    places = {rank: Placement("node", letter) for rank, letter in enumerate(populations)}
    value = build_heat_map(on_one_grid(*ranks), found, places)
    assert value is not None
    assert value == json.loads(json.dumps(value, allow_nan=False))
    return value


def excess(value: dict[str, Any], rank: int) -> list[float | None]:
    found: list[float | None] = value["ranks"][rank]["excess"]
    return found


def test_excess_is_a_share_of_the_other_ranks_work() -> None:
    """A rank with a quarter more work than the others has an excess of 0.25 from that window on."""
    value = of([windows(64), windows(64, extra_ms=25, since=32), windows(64), windows(64)])

    assert (value["width"], value["first_steps"]) == (8, list(range(0, 64, 8)))
    assert excess(value, 1) == [0.0] * 4 + [0.25] * 4
    assert all(excess(value, rank) == [0.0] * 8 for rank in (0, 2, 3))


def test_slow_one_of_two_ranks_has_all_of_the_excess() -> None:
    """The median of both ranks would hide half of the excess."""
    value = of([windows(40), windows(40, extra_ms=50)])
    assert excess(value, 1) == [0.5] * 5
    assert excess(value, 0) == [-0.3333] * 5


def test_rank_slow_in_one_step_of_four_has_an_excess() -> None:
    """A median over the steps of a window would not show the excess."""
    value = of([windows(64), windows(64, extra_ms=40, every=4), windows(64)])
    assert excess(value, 1)[1:] == [0.1] * 7


def test_excess_is_relative_to_ranks_of_the_same_population() -> None:
    """A rank that is alone in its population has no excess."""
    ranks = [
        windows(40),
        windows(40),
        windows(40, extra_ms=100),
        windows(40, extra_ms=100),
        windows(40, extra_ms=500),
    ]
    value = of(ranks, populations="aabbc")

    assert [excess(value, rank) for rank in range(4)] == [[0.0] * 5] * 4
    assert excess(value, 4) == [None] * 5
    alone = on_one_grid(windows(40), windows(40))
    assert build_heat_map(alone, NOTHING, {0: Placement("", "a"), 1: Placement("", "b")}) is None
    assert build_heat_map(on_one_grid(windows(40)), NOTHING, {}) is None
    assert build_heat_map(on_one_grid(), NOTHING, {}) is None


def test_missing_window_is_not_zero_in_the_heat_map() -> None:
    """A window has no value if the rank, or all other ranks, are missing in it."""
    value = of([windows(32), windows(64), windows(24, first=40)])
    assert [[each is None for each in excess(value, rank)] for rank in range(3)] == [
        [False] * 4 + [True] * 4,
        [False] * 4 + [True] + [False] * 3,
        [True] * 5 + [False] * 3,
    ]


def test_heat_map_of_a_long_run_has_at_most_64_columns() -> None:
    """A column has whole windows of all ranks, whatever their widths. Sums stay right."""
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


def test_heat_map_has_tags_and_slow_times_of_ranks() -> None:
    """A column has the tags of all ranks. A rank's slow times are its episodes, also ended ones."""
    tags = {9: Flag.CHECKPOINT, 17: Flag.COMPILED | Flag.EVALUATION}
    found = findings(episode(1, 40), episode(1, 8, 20), episode(7, 3))
    value = of([windows(64, tags=tags), windows(64, tags={25: Flag.EVALUATION})], found)

    assert value["tags"] == [
        [],
        ["checkpoint"],
        ["evaluation", "compile"],
        ["evaluation"],
        [],
        [],
        [],
        [],
    ]
    assert [rank["slow"] for rank in value["ranks"]] == [[], [[8, 20], [40, None]]]


def test_warm_up_steps_are_not_in_the_heat_map() -> None:
    """Warm-up steps are slow for other reasons than a slow rank."""
    value = of([windows(40), windows(40, extra_ms=900, until=WARM_UP_STEPS)])
    assert excess(value, 1)[0] == 0.0


# -- the picture
