"""The heat map of ranks and steps: the excess compute time of each rank in each window of steps."""

from __future__ import annotations

from collections.abc import Mapping

from torchlens_perf.analysis.statistics.run_windows import TAG_NAMES, RunWindows
from torchlens_perf.run.grouping import group_values
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.stragglers.window_excess import compute_window_excess
from torchlens_perf.verdicts.words.report import Heat


def build_heat_map(
    windows: RunWindows | None, findings: Findings, places: Mapping[int, Placement]
) -> Heat | None:
    """Return the report's `heat`: excess compute time by rank and window. All ranks have the same
    windows.

    Return None if no two ranks can be compared, or if devices hide the delays of their hosts: a
    rank that waits for others then has little work by its device's clock.

    - `excess`: a rank's work in a window relative to the median of the other ranks in its
      population, minus 1. It is null if the rank, or all other ranks, have no comparable work in
      the window.
    - `slow`: pairs of first step and end step of the rank's straggler episodes; the end is null if
      the rank is still slow.
    - `tags`: for each window, other activity of any rank in it.
    """
    if windows is None or any(each.own and each.own.is_hidden for each in findings.usual):
        return None
    populations = [places[rank].population if rank in places else "" for rank in windows.ranks]
    if len(set(populations)) == len(populations):
        return None
    rounded = [
        [round(value, 4) if value == value else None for value in values]
        for values in compute_window_excess(windows, places).tolist()
    ]
    slow = group_values(
        (episode.rank, [episode.since_step, episode.until_step])
        for episode in sorted(findings.episodes, key=lambda episode: episode.since_step)
    )
    return {
        "width": windows.width,
        "first_steps": windows.first_steps.tolist(),
        "tags": [
            [name for name, flag in TAG_NAMES.items() if found & flag] for found in windows.tags
        ],
        "ranks": [
            {"rank": rank, "excess": row, "slow": slow.get(rank, [])}
            for rank, row in zip(windows.ranks, rounded, strict=True)
        ],
    }
