"""Choose the steps and ranks that the page shows span by span. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.run_windows import TAG_NAMES
from torchlens_perf.analysis.statistics.step_bins import OTHER_WORK
from torchlens_perf.page.contents import SlowPeriod
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.words.order import has_ended
from torchlens_perf.view.rank_tables import compute_s

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.page.gather.step_grid import StepGrid
    from torchlens_perf.verdicts.words.report import Rank, Report

    Floats = npt.NDArray[np.float64]
    Mask = npt.NDArray[np.bool_]
    _Choice = tuple[Mask, str, Callable[[Floats, Mask], int]]
    """Candidates, reason, and the function that chooses one of them."""

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
    if not there.any():
        return []
    ends = numbers[there]
    warm = there & (numbers >= warm_from)
    usual = warm & ((grid.single_flags & OTHER_WORK) == 0)
    timed = usual & ((grid.single_flags & Flag.WITHOUT_MODULES) == 0)
    # A step whose modules were timed shows more.
    usual = timed if timed.any() else usual
    newest = there & (numbers > ends[-1] - max(1, len(ends) // _NEWEST_FRACTION))
    now = next((each for each in slow if not has_ended(each)), None)
    choices: list[_Choice] = [(warm, "slowest", _longest_step)]
    choices += [
        (
            there & (numbers == each["since_step"]),
            f"first slow step of rank {each['rank']}",
            _longest_step,
        )
        for each in slow[:_MAX_SLOW_TIMES]
    ]
    if now is None:
        choices.append((usual, "typical", _step_nearest_median))
    else:
        rank, is_slow = now["rank"], numbers >= now["since_step"]
        words = f"typical step while rank {rank} is slow"
        choices.insert(0, (usual & is_slow, words, _step_nearest_median))
        words = f"typical step before rank {rank} was slow"
        choices.append((usual & ~is_slow, words, _step_nearest_median))
    choices += [
        (warm & ((grid.single_flags & flag) != 0), f"longest with {kind}", _longest_step)
        for kind, flag in TAG_NAMES.items()
    ]
    choices += [
        (numbers == ends[0], "first", _longest_step),
        (numbers == ends[-1], "last", _longest_step),
        (newest, "longest of the newest", _longest_step),
    ]
    found: dict[int, str] = {}
    for candidates, why, choose in choices:
        if candidates.any():
            found.setdefault(int(numbers[choose(grid.single_ns, candidates)]), why)
    for number in ends[np.linspace(0, len(ends) - 1, MAX_STEPS).astype(np.int64)].tolist():
        found.setdefault(number, "one of many")
    return list(found.items())[:MAX_STEPS]


def _longest_step(durations: Floats, candidates: Mask) -> int:
    return int(np.where(candidates, durations, -1.0).argmax())


def _step_nearest_median(durations: Floats, candidates: Mask) -> int:
    distance = np.abs(durations - np.median(durations[candidates]))
    return int(np.where(candidates, distance, np.inf).argmin())


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
    named = [verdict["rank"] for verdict in report["verdicts"] if verdict["rank"] in rows]
    named += [each["rank"] for each in reversed(slow) if each["rank"] in rows]
    by_compute = sorted(rows, key=lambda rank: -compute_s(rows[rank]))
    chosen = list(dict.fromkeys([*(rank for rank in named if rank is not None), *by_compute]))[
        :_SLOW
    ]
    nodes = list(dict.fromkeys(node_of[rank] for rank in chosen))[:2]
    near = [rank for rank in rows if node_of[rank] in nodes and rank not in chosen]
    chosen += sorted(near, key=lambda rank: -_waiting_s(rows[rank]))[:_WAITING]
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


def _waiting_s(rank: Rank) -> float:
    return (
        rank["typical"]["parts"].get("communication", 0.0) if rank["typical"] is not None else 0.0
    )
