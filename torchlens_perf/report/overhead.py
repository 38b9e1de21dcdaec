"""Estimate this tool's share of the step time, with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from torchlens_perf.run.records import PASSES
from torchlens_perf.run.sketch import merge_sketches
from torchlens_perf.verdicts.node_state import ProcessState

# Cost of a record, if the rank has not measured it. Recording a span in a real step costs more than
# the 0.1 us in a tight loop, because caches are cold (docs/internals/performance.md).
MARK_NS = 400.0
# Standard error of the calibrated cost of a record, as a share of the cost. On a busy machine, the
# CPU time of steps with and without 101 calls differed by 1.06 +- 0.21 and 0.83 +- 0.34 times the
# calibrated cost. Calibration leaves out what a record costs the user's code in caches.
_CALIBRATION_ERROR = 0.5
# Hooks measure their own time, and not what they cost the user's code afterwards, because they take
# space in the processor's caches. The CPU time of jobs that ran with and without a watch differed by
# 1.6 to 2.4 times the time in hooks (docs/internals/performance.md).
_MOST_AFTERWARDS = 2.5
_STANDARD_ERRORS = 1.96


class Overhead(NamedTuple):
    """Time of this tool on the training thread, as a fraction of the step time."""

    share: float | None
    low: float | None
    """Lower end of the interval: nothing but the measured time, and 95 % for the records."""
    high: float | None
    """Upper end: with what hooks cost afterwards, which is not measured."""


def estimate_overhead(processes: Mapping[int, ProcessState]) -> Overhead:
    """Return hook time plus the cost of all records, as a fraction of the step time.

    The values are None without steps. Warm-up steps count only if there are no others, since a step
    that compiles would hide the cost.
    """
    statistics = [process.statistics for process in processes.values()]
    steps = merge_sketches(each.step for each in statistics)
    warm_up = merge_sketches(each.warm_up for each in statistics)
    taken = steps if steps.count else warm_up
    if not taken.sum_ns:
        return Overhead(None, None, None)
    hooks_ns = sum(process.tool_ns for process in processes.values())
    records_ns = sum(_mark_ns(each) * each.statistics.records for each in processes.values())
    all_steps_ns = (steps.count + warm_up.count) * taken.sum_ns / taken.count
    factor, error = _compare_with_measurement(processes)

    low = max(0.0, factor - _STANDARD_ERRORS * error)
    return Overhead(
        (hooks_ns + max(0.0, factor) * records_ns) / all_steps_ns,
        (hooks_ns + low * records_ns) / all_steps_ns,
        (_MOST_AFTERWARDS * hooks_ns + (factor + _STANDARD_ERRORS * error) * records_ns)
        / all_steps_ns,
    )


def largest_period(
    processes: Mapping[int, ProcessState], of: Literal["module_period", "phase_period"]
) -> int:
    """Return n, if the rank that times least often does so in one of n steps."""
    return max((each.facts.recording.get(of, 1) for each in processes.values()), default=1)


def _mark_ns(process: ProcessState) -> float:
    return process.facts.recording.get("mark_ns") or MARK_NS


def _compare_with_measurement(processes: Mapping[int, ProcessState]) -> tuple[float, float]:
    """Return the cost of a record as a multiple of the calibrated cost, and its standard error.

    The cost of a call of a module is measured by comparing steps, and combined with the calibrated
    cost, weighted by precision.
    """
    calibrated_ns = measured_ns = error_ns = 0.0
    for process in processes.values():
        statistics, cost = process.statistics, process.statistics.module_cost.estimate()
        # The calls of a root are timed in each step, and so are passes without gradients.
        calls = sum(
            sketch.count
            for name, sketch in statistics.modules.items()
            if name not in (PASSES, *process.facts.root_modules)
        )
        if cost is not None and calls:
            calibrated_ns += _mark_ns(process) * calls / statistics.module_steps
            measured_ns += cost.mean_ns
            # Ranks wait for each other, so their errors may be equal and are not averaged.
            error_ns += cost.error_ns
    if not calibrated_ns:
        return 1.0, _CALIBRATION_ERROR
    measured, measured_variance = measured_ns / calibrated_ns, (error_ns / calibrated_ns) ** 2
    # A measurement that contradicts the calibration shows that the calibration is wrong.
    calibrated_variance = max(
        _CALIBRATION_ERROR**2, (measured - 1) ** 2 - _STANDARD_ERRORS**2 * measured_variance
    )
    total = calibrated_variance + measured_variance
    factor = (measured * calibrated_variance + measured_variance) / total
    return factor, math.sqrt(calibrated_variance * measured_variance / total)
