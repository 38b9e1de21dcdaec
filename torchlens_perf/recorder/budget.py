"""Keep the recorder's cost below a share of the training time. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

EVERY_STEP = -1
"""Value of Recorder.module_mask with which modules are timed in every step."""
# The measured cost leaves out what a mark costs the user's code afterwards, because it takes space in
# the processor's caches: up to as much again. benchmarks/training_step.py compares the two.
_MEASURED_SHARE = 0.5
# Cost of a record in ns until a call has been measured.
_UNMEASURED_NS = 400.0
_MIN_WINDOW_NS = 50_000_000
# A shorter period must fit into the budget with this much room, and a few times in succession.
# Otherwise the period would change in each window of a noisy job.
_ROOM, _CALM_WINDOWS = 0.7, 8
# Modules may cost this share of what everything else costs, even above the budget: leaving out more
# would save little and tell nothing about the modules of very short steps. Without phases, slow ranks
# are found later, so phases are left out only if they cost more than everything else.
_LEAST_SHARE, _LEAST_SHARE_OF_PHASES = 0.1, 1.0
# The median over these windows leaves out hooks and marks in which the kernel has interrupted or
# stopped the process, and the rare steps in which hooks do more. SamplingSchedule limits the latter.
_REMEMBERED_WINDOWS = 7


class Spent(NamedTuple):
    """Counts of the recorder since its start."""

    step: int
    time_ns: int
    tool_ns: int
    """Time in hooks of this package, without the cost of records."""
    records: int
    module_calls: int
    """Timed calls of modules inside of a forward pass. Each writes a record."""
    module_steps: int
    """Steps in which these calls were timed."""
    measured_calls: int
    """Calls whose cost was measured."""
    measured_ns: int
    phases_ns: int = 0
    """Time of marking phases on the device."""
    phase_steps: int = 0
    """Steps in which all phases were marked on the device."""


class _Level:
    """Choice of how often something is timed: at level k, in one step of 2**k.

    Which steps these are depends on the step's number only, and each level's steps also belong to
    all lower levels: ranks have common steps without communication.
    """

    def __init__(self, highest: int) -> None:
        self._highest = highest
        self._level = 0
        self._calm = 0

    @property
    def period(self) -> int:
        """The number of steps of which one is timed."""
        return 1 << self._level

    def choose(self, limit_ns: float, cost_ns: float) -> bool:
        """Choose the level. Return True if it has changed.

        limit_ns: largest cost per step. cost_ns: the cost in a step that is timed.
        """
        before = self._level
        while self._level < self._highest and cost_ns > limit_ns * self.period:
            self._level += 1
        fits_below = cost_ns <= _ROOM * limit_ns * self.period / 2
        self._calm = self._calm + 1 if self._level == before > 0 and fits_below else 0
        if self._calm == _CALM_WINDOWS:
            self._level, self._calm = self._level - 1, 0
        return self._level != before


class Budget:
    """Chooses in which steps the calls of modules are timed, and phases on a device.

    Modules are thinned first. Phases are thinned if everything else but modules exceeds the budget.
    Level 0 of modules leaves out one step of 64, so that the cost of timing can be estimated from
    steps with and without. Everything else is recorded in every step.
    """

    def __init__(self, share: float, start: Spent) -> None:
        """share: largest share of the training time that recording may take."""
        self._share = share
        self._last = start
        self.modules, self.phases = _Level(10), _Level(6)
        self._calls_per_step = 0.0
        self._phases_ns: deque[float] = deque(maxlen=_REMEMBERED_WINDOWS)
        self._marks_ns: deque[float] = deque(maxlen=_REMEMBERED_WINDOWS)
        self._others_ns: deque[float] = deque(maxlen=_REMEMBERED_WINDOWS)
        self._steps_ns: deque[float] = deque(maxlen=_REMEMBERED_WINDOWS)

    @property
    def module_mask(self) -> int:
        """Value for Recorder.module_mask."""
        return self.modules.period - 1

    @property
    def phase_mask(self) -> int:
        """Value for Recorder.phase_mask."""
        return self.phases.period - 1 if self.phases.period > 1 else EVERY_STEP

    @property
    def mark_ns(self) -> float | None:
        """Measured cost of timing a call; None before the first measurement."""
        return statistics.median(self._marks_ns) if self._marks_ns else None

    def update(self, now: Spent) -> bool:
        """Choose the level. Return True if it has changed."""
        last = self._last
        steps = now.step - self._last.step
        time_ns = now.time_ns - self._last.time_ns
        if steps < 1 or time_ns < _MIN_WINDOW_NS:
            return False
        self._last = now
        if now.module_steps > last.module_steps:
            self._calls_per_step = (now.module_calls - last.module_calls) / (
                now.module_steps - last.module_steps
            )
        calls = now.measured_calls - last.measured_calls
        if calls:
            self._marks_ns.append((now.measured_ns - last.measured_ns) / calls)
        mark_ns = self.mark_ns or _UNMEASURED_NS
        others = now.records - last.records - (now.module_calls - last.module_calls)
        in_phases_ns = now.phases_ns - last.phases_ns
        hooks_ns = now.tool_ns - last.tool_ns - in_phases_ns
        self._others_ns.append((hooks_ns + mark_ns * max(0, others)) / steps)
        self._steps_ns.append(time_ns / steps)
        if now.phase_steps > last.phase_steps:
            self._phases_ns.append(in_phases_ns / (now.phase_steps - last.phase_steps))
        whole_ns = _MEASURED_SHARE * self._share * statistics.median(self._steps_ns)
        others_ns = statistics.median(self._others_ns)
        # Cost of phases in a step in which they are timed on the device.
        phases_ns = statistics.median(self._phases_ns) if self._phases_ns else 0.0
        fixed_ns = others_ns + phases_ns / self.phases.period
        limit_ns = max(whole_ns - fixed_ns, _LEAST_SHARE * fixed_ns)
        changed = self.modules.choose(limit_ns, mark_ns * self._calls_per_step)
        limit_ns = max(whole_ns - others_ns, _LEAST_SHARE_OF_PHASES * others_ns)
        return self.phases.choose(limit_ns, phases_ns) or changed
