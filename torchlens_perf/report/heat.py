"""The heat map of ranks and steps: how much more compute time each rank had than the others, by window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.stragglers.window_excess import window_excess

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.run_windows import RunWindows
    from torchlens_perf.verdicts.words.report import Heat

TAGS = {
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
        "tags": [[name for name, flag in TAGS.items() if found & flag] for found in windows.tags],
        "ranks": [
            {"rank": rank, "excess": row, "slow": slow[rank]} for rank, row in zip(windows.ranks, rounded, strict=True)
        ],
    }
