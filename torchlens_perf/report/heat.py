"""How much more work each rank had than the others, over the whole run: one number for each rank and window. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.excess import excess_over_others
from torchlens_perf.rank_statistics import Windows
from torchlens_perf.ring import Flag
from torchlens_perf.straggler import Findings, Place

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_COLUMNS = 64
_TAGS = {
    "checkpoint": Flag.CHECKPOINT, "evaluation": Flag.EVALUATION, "compile": Flag.COMPILED, "capture": Flag.CAPTURED,
}  # fmt: skip


def heat(windows: Mapping[int, Windows], findings: Findings, places: Mapping[int, Place]) -> dict[str, Any] | None:
    """The report's `heat`: at most MOST_COLUMNS windows, the same for all ranks. None if there is nobody to compare.

    `excess` is a rank's work in a window, above the median of the other ranks that do the same, as a share of that
    median; null where it, or all others, have no work there that can be compared. `slow` holds since and until which
    step it was a straggler, null for still. `tags` has for each window what else any rank did in it.
    """
    ranks = [rank for rank in sorted(windows) if len(windows[rank].first_step)]
    populations: dict[str, list[int]] = defaultdict(list)
    for row, rank in enumerate(ranks):
        populations[places[rank].population if rank in places else ""].append(row)
    if all(len(rows) < 2 for rows in populations.values()):
        return None
    width, first, columns = _grid([windows[rank] for rank in ranks])
    work_ns = np.stack([_mean_work(windows[rank], width, first, columns) for rank in ranks])
    excess = np.full(work_ns.shape, np.nan)
    for rows in populations.values():
        excess[rows] = _excess(work_ns[rows])
    slow = defaultdict(list)
    for episode in sorted(findings.episodes, key=lambda episode: episode.since_step):
        slow[episode.rank].append([episode.since_step, episode.until_step])
    return {
        "width": width,
        "first_steps": [first + column * width for column in range(columns)],
        "tags": _tags([windows[rank] for rank in ranks], width, first, columns),
        "ranks": [
            {"rank": rank, "excess": [_rounded(value) for value in values], "slow": slow[rank]}
            for rank, values in zip(ranks, excess.tolist(), strict=True)
        ],
    }


def _grid(windows: list[Windows]) -> tuple[int, int, int]:
    """Width and first step of the columns, and how many there are: windows of all ranks fit into them whole."""
    width = max(each.width for each in windows)
    low = min(int(each.first_step[0]) for each in windows)
    high = max(int(each.first_step[-1]) + each.width for each in windows)
    while (high - 1) // width - low // width >= MOST_COLUMNS:
        width *= 2
    return width, low // width * width, (high - 1) // width - low // width + 1


def _mean_work(windows: Windows, width: int, first: int, columns: int) -> npt.NDArray[np.float64]:
    at = (windows.first_step - first) // width
    steps = np.bincount(at, windows.work_steps, columns)
    sums = np.bincount(at, windows.work_sum_ns, columns)
    means: npt.NDArray[np.float64] = np.divide(sums, steps, out=np.full(columns, np.nan), where=steps > 0)
    return means


def _excess(work_ns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[ranks, columns] of ranks that do the same; NaN where there is no other rank."""
    relative = np.full(work_ns.shape, np.nan)
    for column, values in enumerate(work_ns.T):
        present = np.flatnonzero(np.isfinite(values))
        if len(present) > 1:
            above = excess_over_others(values[present, None])[:, 0]
            others = values[present] - above
            known = others > 0
            relative[present[known], column] = above[known] / others[known]
    return relative


def _tags(windows: list[Windows], width: int, first: int, columns: int) -> list[list[str]]:
    flags = [0] * columns
    for each in windows:
        for step, found in each.tags.items():
            column = (step - first) // width
            if 0 <= column < columns:
                flags[column] |= found
    return [[name for name, flag in _TAGS.items() if found & flag] for found in flags]


def _rounded(value: float) -> float | None:
    return round(value, 4) if value == value else None
