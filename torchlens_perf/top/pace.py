"""How far a run is, how fast it goes, and how long it will take: only as far as that is known."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.quantities import percent

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Report

_CHANGED = 0.1  # so much faster or slower than the run's mean, the time left is said by both
_RECENT = 8  # the newest of so many parts of the curve
_SEEN_NS, _MIN_SEEN_NS = 60_000_000_000, 3_000_000_000


@dataclasses.dataclass(frozen=True)
class Pace:
    """Times are in seconds."""

    steps: int | None
    """How many the furthest rank has made, from the first one on; None before that."""
    total: int | None
    """How many there will be; None: not known."""
    mean_s: float | None
    """Of all steps but the warm-up, by the hosts' clocks: what the wall clock shows."""
    curve_s: tuple[float, ...] = ()
    """Step times in windows of consecutive steps, the oldest first."""
    window_steps: int = 0
    seen_s: float | None = None
    """What a step has taken lately, as seen from look to look; None: there was one look only."""

    @property
    def now_s(self) -> float | None:
        """What a step takes now: as seen lately, or in the newest window."""
        return self.seen_s if self.seen_s is not None else self.curve_s[-1] if self.curve_s else None

    @property
    def steps_per_s(self) -> float | None:
        """Now; over the run, while there is no window."""
        step_s = self.now_s or self.mean_s
        return 1 / step_s if step_s else None

    @property
    def recent_s(self) -> float | None:
        """Of the newest windows: one alone varies by chance."""
        newest = self.curve_s[-max(1, len(self.curve_s) // _RECENT) :]
        return sum(newest) / len(newest) if newest else None

    @property
    def left_s(self) -> tuple[float, ...]:
        """How long the rest will take: by the run's mean step, and by the newest ones where they take another time.

        Empty where it is not known.
        """
        if self.total is None or self.steps is None or self.mean_s is None or self.steps > self.total:
            return ()
        left, recent_s = self.total - self.steps, self.recent_s
        found = [left * self.mean_s]
        if recent_s is not None and self.mean_s and abs(recent_s / self.mean_s - 1) > _CHANGED:
            found.append(left * recent_s)
        return tuple(found)

    @property
    def progress(self) -> str:
        """As "1,240 of 10,000 steps (12%)"; "" before the first step."""
        if self.steps is None:
            return ""
        made = f"{self.steps:,} step{'s' if self.steps != 1 else ''}"
        if self.total is None:
            return made
        if self.steps > self.total:
            return f"{made}, more than the {self.total:,} expected"
        return f"{self.steps:,} of {self.total:,} steps ({percent(self.steps / self.total)})"


class SeenSteps:
    """How fast one rank is, by what it had made at each look of the last minute: windows of a long run are long."""

    def __init__(self) -> None:
        self._process = ""
        self._made: deque[tuple[int, int]] = deque()

    def add(self, process: str, last_step: int, ended_ns: int) -> float | None:
        """What a step has taken since the oldest look; None where that was too short ago.

        process: another one begins anew. ended_ns: when its last step ended, by its node's monotonic clock.
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


def pace(report: Report, seen_s: float | None = None) -> Pace:
    """seen_s: by SeenSteps."""
    made = [rank["last_step"] + 1 for rank in report["ranks"] if rank["last_step"] is not None]
    means = [mean for rank in report["ranks"] if (mean := rank["step_s"]["mean_s"]) is not None]
    history = report["history"]
    return Pace(
        steps=max(made, default=None),
        total=report["run"]["total_steps"],
        mean_s=sum(means) / len(means) if means else None,
        curve_s=tuple(history["median_s"]) if history is not None else (),
        window_steps=history["width"] if history is not None else 0,
        seen_s=seen_s,
    )


def time_left(seconds: float) -> str:
    """As people say it: two units at most."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def curve(values: Sequence[float], width: int, blocks: str) -> str:
    """One line of at most `width` characters: means of neighbours where there are more values. The lowest is the
    shortest block, so that a change is seen; text beside it says how large it is."""
    if not values or width < 1:
        return ""
    groups = np.array_split(np.array(values), min(width, len(values)))
    means = np.array([group.mean() for group in groups])
    low, high = means.min(), means.max()
    if high - low < 0.02 * high:  # what varies by less is no change
        return blocks[0] * len(means)
    levels = np.round((means - low) / (high - low) * (len(blocks) - 1)).astype(int)
    return "".join(blocks[level] for level in levels.tolist())
