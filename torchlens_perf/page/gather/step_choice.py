"""Choose the steps and ranks that the page shows span by span. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.run_windows import TAG_NAMES
from torchlens_perf.analysis.statistics.step_bins import OTHER_WORK
from torchlens_perf.page.contents import SlowPeriod
from torchlens_perf.page.gather.step_grid import StepGrid
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.rank_tables import compute_s

MAX_STEPS = 64
# In larger jobs, the page shows slow ranks, ranks that wait for them, and typical ranks.
MAX_RANKS = 16
_SLOW, _WAITING, _USUAL = 6, 4, 3
_MAX_SLOW_TIMES = 8
# The newest steps are the last 1/10 of all recorded steps.
_NEWEST_FRACTION = 10


def choose_steps(
    grid: StepGrid, slow: Sequence[SlowPeriod], warm_from: int, kept: tuple[int, int] | None
) -> list[tuple[int, str]]:
    """Return step numbers with the reason for each choice, most informative steps first.

    kept: the first and last step with records; None without records.
    """
    if kept is None:
        return []
    numbers = grid.first_single + np.arange(len(grid.single_ns))
    there = (grid.single_ns > 0) & (numbers >= kept[0]) & (numbers <= kept[1])
    usual = there & ((grid.single_flags & OTHER_WORK) == 0) & (numbers >= warm_from)
    timed = usual & ((grid.single_flags & Flag.WITHOUT_MODULES) == 0)
    # A step whose modules were timed shows more.
    usual = timed if timed.any() else usual
    found: dict[int, str] = {}

    def add_step(of: npt.NDArray[np.bool_], why: str, *, typical: bool = False) -> None:
        """Choose the step nearest to the median if `typical`, else the longest one."""
        places = np.flatnonzero(of)
        if len(places):
            durations = grid.single_ns[places]
            distance = np.abs(durations - np.median(durations)) if typical else -durations
            found.setdefault(int(numbers[places[distance.argmin()]]), why)

    now = [each for each in slow if each["until_step"] is None]
    for each in now[:1]:
        add_step(
            usual & (numbers >= each["since_step"]),
            f"typical step while rank {each['rank']} is slow",
            typical=True,
        )
    add_step(there & (numbers >= warm_from), "slowest")
    for each in slow[:_MAX_SLOW_TIMES]:
        add_step(there & (numbers == each["since_step"]), f"first slow step of rank {each['rank']}")
    for each in now[:1]:
        add_step(
            usual & (numbers < each["since_step"]),
            f"typical step before rank {each['rank']} was slow",
            typical=True,
        )
    if not now:
        add_step(usual, "typical", typical=True)
    for kind, flag in TAG_NAMES.items():
        add_step(
            there & ((grid.single_flags & flag) != 0) & (numbers >= warm_from),
            f"longest with {kind}",
        )
    ends = numbers[there]
    if len(ends):
        add_step(there & (numbers == ends[0]), "first")
        add_step(there & (numbers == ends[-1]), "last")
        add_step(
            there & (numbers > ends[-1] - max(1, len(ends) // _NEWEST_FRACTION)),
            "longest of the newest",
        )
        for number in np.unique(
            ends[np.linspace(0, len(ends) - 1, MAX_STEPS).astype(np.int64)]
        ).tolist():
            found.setdefault(number, "one of many")
    return list(found.items())[:MAX_STEPS]


def choose_ranks(
    report: Report, slow: Sequence[SlowPeriod], node_of: Mapping[int, str]
) -> list[int]:
    """Return at most MAX_RANKS ranks in ascending order.

    Ranks of a small job are all chosen. In a larger job, these are slow ranks, ranks on their nodes
    that wait most, and typical ranks. Most of them are on two nodes, so few files must be read.
    """
    rows = {rank["rank"]: rank for rank in report["ranks"]}
    if len(rows) <= MAX_RANKS:
        return sorted(rows)
    named = [verdict.rank for verdict in report["verdicts"] if verdict.rank in rows]
    named += [each["rank"] for each in slow if each["rank"] in rows]
    by_compute = sorted(rows, key=lambda rank: -compute_s(rows[rank]))
    chosen = list(dict.fromkeys([*(rank for rank in named if rank is not None), *by_compute]))[
        :_SLOW
    ]
    nodes = list(dict.fromkeys(node_of[rank] for rank in chosen))[:2]
    near = [rank for rank in rows if node_of[rank] in nodes and rank not in chosen]
    waits_s = {
        rank: row["typical"]["parts"].get("communication", 0.0)
        for rank, row in rows.items()
        if row["typical"] is not None
    }
    chosen += sorted(near, key=lambda rank: -waits_s.get(rank, 0.0))[:_WAITING]
    middle = compute_s(rows[by_compute[len(by_compute) // 2]])
    usual = sorted(
        (rank for rank in near if rank not in chosen),
        key=lambda r: abs(compute_s(rows[r]) - middle),
    )
    chosen += usual[:_USUAL]
    elsewhere = next(
        (rank for rank in by_compute[len(by_compute) // 2 :] if rank not in chosen), None
    )
    return sorted([*chosen, *([elsewhere] if elsewhere is not None else [])])[:MAX_RANKS]
