"""Step times over the run, for charts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torchlens_perf.analysis.statistics.rank import Windows
from torchlens_perf.analysis.statistics.run_windows import choose_grid, column_means
from torchlens_perf.verdicts.words.report import StepHistory


def build_step_history(windows: Mapping[int, Windows]) -> StepHistory | None:
    """Return step times by window for the report's `history`; None if all steps are warm-up
    steps.
    """
    warm = {rank: each.first_step >= (each.warm_from or 0) for rank, each in windows.items()}
    of_ranks = {rank: windows[rank] for rank, rows in warm.items() if rows.any()}
    if not of_ranks:
        return None
    width, first, columns = choose_grid(list(of_ranks.values()))
    means_ns = [
        column_means(
            each.duration_ns[warm[rank], None],
            (each.first_step[warm[rank]] - first) // width,
            columns,
        )
        for rank, each in of_ranks.items()
    ]
    step_s = np.concatenate(means_ns, axis=1).T / 1e9
    known = np.isfinite(step_s).any(axis=0)
    step_s = step_s[:, known]
    return {
        "width": width,
        "first_steps": [first + column * width for column in np.flatnonzero(known).tolist()],
        "median_s": np.nanmedian(step_s, axis=0).tolist(),
        "fastest_s": np.nanmin(step_s, axis=0).tolist(),
        "slowest_s": np.nanmax(step_s, axis=0).tolist(),
    }
