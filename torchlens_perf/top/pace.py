"""Progress and speed of a run, and the time left if the total number of steps is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from torchlens_perf.analysis.statistics.quantities import (
    format_duration,
    format_duration_or_dash,
    format_percent,
    format_rounded,
)
from torchlens_perf.top.text import BLOCKS
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.step_words import step_count_text

# If the recent step time differs more than this from the run's mean, it gives a second estimate of
# the time left.
_NOTABLE_CHANGE = 0.1
# The recent step time is the mean over the last 1/8 of the windows.
_RECENT_FRACTION = 8
_SEEN_NS, _MIN_SEEN_NS = 60_000_000_000, 3_000_000_000


def describe_pace(report: Report, seen_s: float | None) -> list[str]:
    """Return progress, rates and step times in words.

    A hanging or ended run has no rate. seen_s: from SeenSteps.
    """
    steps = report["steps"]
    total = report["run"]["total_steps"]
    windows_s = window_median_step_s(report)
    made = max(
        (rank["last_step"] + 1 for rank in report["ranks"] if rank["last_step"] is not None),
        default=0,
    )
    if made and total is not None:
        words = [describe_progress(made, total)]
    else:
        words = [step_count_text(report) if steps["count"] else "no step yet"]
    if report["run"]["live"] and not any(row.kind == "hang" for row in report["verdicts"]):
        means = [mean for rank in report["ranks"] if (mean := rank["step_s"]["mean_s"]) is not None]
        left = estimate_time_left_s(
            made, total, sum(means) / len(means) if means else None, windows_s
        )
        words += [f"{' or '.join(dict.fromkeys(map(format_time_left, left)))} left"] if left else []
        now_s = seen_s or (windows_s[-1] if windows_s else None)
        words += (
            [f"{format_rounded(1 / now_s)} steps/s", f"now {format_duration(now_s)}"]
            if now_s
            else []
        )
    if steps["p50_s"] is not None:
        words += [
            f"p50 {format_duration(steps['p50_s'])}",
            f"p95 {format_duration_or_dash(steps['p95_s'])}",
            f"max {format_duration_or_dash(steps['max_s'])}",
        ]
    return [*words, *["device clock"] * (steps["by"] == DEVICE)]


def window_median_step_s(report: Report) -> Sequence[float]:
    """Return step times in windows of consecutive steps, oldest first."""
    return report["history"]["median_s"] if report["history"] is not None else ()


def describe_progress(made: int, total: int) -> str:
    """Return the progress in words, such as "1,240 of 10,000 steps (12%)"."""
    if made > total:
        return f"{made:,} steps, more than the {total:,} expected"
    return f"{made:,} of {total:,} steps ({format_percent(made / total)})"


def estimate_time_left_s(
    made: int, total: int | None, mean_s: float | None, windows_s: Sequence[float]
) -> tuple[float, ...]:
    """Return estimates of the time left: by the mean step, and by the newest windows if these
    differ.

    Return an empty tuple if the time left is not known.
    """
    if total is None or not mean_s or not 0 < made <= total:
        return ()
    newest = windows_s[-max(1, len(windows_s) // _RECENT_FRACTION) :]
    recent_s = sum(newest) / len(newest) if newest else mean_s
    means = (mean_s, recent_s) if abs(recent_s / mean_s - 1) > _NOTABLE_CHANGE else (mean_s,)
    return tuple((total - made) * each for each in means)


class RecentStepRate:
    """The step rate of one rank over the last minute.

    In a long run, the report's windows are longer than that.
    """

    def __init__(self) -> None:
        self._process = ""
        self._made: deque[tuple[int, int]] = deque()

    def add(self, process: str, last_step: int, ended_ns: int) -> float | None:
        """Return the seconds per step since the oldest observation; None if that was too recent.

        process: key of the process; a new process resets the count. ended_ns: end of the last step,
        by the node's monotonic clock.
        """
        made = self._made
        if process != self._process or (made and last_step < made[-1][0]):
            self._process = process
            made.clear()
        if not made or last_step > made[-1][0]:
            made.append((last_step, ended_ns))
        while len(made) > 2 and made[1][1] <= ended_ns - _SEEN_NS:
            made.popleft()
        steps, took_ns = made[-1][0] - made[0][0], made[-1][1] - made[0][1]
        return took_ns / steps / 1e9 if steps and took_ns >= _MIN_SEEN_NS else None


def format_time_left(seconds: float) -> str:
    """Return a long duration in at most two units."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def draw_curve(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """Return `height` lines of `width` blocks.

    The curve has no axis: the lowest value is the lowest block.

    If there are more values than columns, a block is the mean of neighbouring values.
    """
    if not values or width < 1:
        return [""] * height
    means = np.array(
        [group.mean() for group in np.array_split(np.array(values), min(width, len(values)))]
    )
    low, high, levels = means.min(), means.max(), np.ones(len(means), int)
    # Variation below 2 % is drawn as a flat line.
    if high - low >= 0.02 * high:
        levels += np.round((means - low) / (high - low) * (8 * height - 1)).astype(int)
    levels = levels[np.arange(width) * len(levels) // width]
    rows = (np.clip(levels - 8 * row, 0, 8).tolist() for row in reversed(range(height)))
    return ["".join(BLOCKS[level] for level in row) for row in rows]
