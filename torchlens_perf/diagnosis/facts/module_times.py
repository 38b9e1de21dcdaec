"""Estimate the device time of modules from few samples, which outliers may disturb. Pure.

Devices time modules in some steps only, and other programs on a device may delay any module. A time
is therefore the median of at least MIN_SAMPLES samples. Modules that do the same work share their
samples: modules whose names differ only in numbers, and whose FLOPs are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.operators import Pass
from torchlens_perf.run.records import PASSES
from torchlens_perf.run.sketch import PER_OCTAVE, Sketch, merge_sketches
from torchlens_perf.verdicts.node_state import ProcessState

MIN_SAMPLES = 5
"""The median of 5 samples lies between the smallest and the largest with a probability of 94 %."""
# The calls of one step are one sample. Samples of several modules are from at least two steps.
_MIN_STEPS = 2
# Modules are equal if the middle half of their samples differs by at most this factor.
_MAX_SPREAD = 1.25
# A quantile of a sketch is exact up to this factor.
_BUCKET = 2 ** (0.5 / PER_OCTAVE)
# Calls that a step makes more often may differ, for example in the length of their input.
_ABOUT_ONCE = 1.1


class ModuleTime(NamedTuple):
    """Time of one module with an interval of about 95 %, and where it is from."""

    value: float
    low: float
    high: float
    samples: int
    """Number of samples, one for each step and module."""
    equal: str = ""
    """Pattern of the names of modules that share the samples; "" if all are from this module."""


def estimate_device_self_times(process: ProcessState) -> dict[str, ModuleTime]:
    """Return the device seconds of each module in a typical step, without inner modules.

    Modules with too few samples are left out, and so are modules around them.
    """
    statistics = process.statistics
    calls = _calls_per_step(statistics)
    whole = _estimate_times(statistics, calls)
    own: dict[str, ModuleTime] = {}
    for name, found in whole.items():
        inside = _find_nearest_inside(name, calls, process.facts.root_modules)
        if all(each in whole for each in inside):
            own[name] = _subtract(found, [whole[each] for each in inside])
    return own


def count_device_samples(process: ProcessState) -> dict[str, int]:
    """Return the number of samples of each module, without those of equal modules."""
    calls, sketches = _calls_per_step(process.statistics), _sample_sketches(process.statistics)
    return {name: _count_samples(sketches.get(name, Sketch()), calls[name]) for name in calls}


def _sample_sketches(statistics: RankStatistics) -> Mapping[str, Sketch]:
    device = statistics.device
    return device.modules if device.fed_modules is None else device.fed_modules


def _calls_per_step(statistics: RankStatistics) -> dict[str, float]:
    """Return the calls per step of each module that the device has timed.

    Passes without gradients may be of several modules.
    """
    if not statistics.module_steps:
        return {}
    return {
        name: statistics.modules[name].count / statistics.module_steps
        for name in statistics.device.modules
        if name in statistics.modules and name != PASSES
    }


def _count_samples(sketch: Sketch, calls_per_step: float) -> int:
    """Return the smallest number of steps that these calls can be from."""
    return math.ceil(sketch.count / max(1.0, calls_per_step) - 1e-9)


def _estimate_times(
    statistics: RankStatistics, calls: Mapping[str, float]
) -> dict[str, ModuleTime]:
    """Return the device seconds of each module in a step, with its inner modules."""
    sketches, found = _sample_sketches(statistics), {}
    for names in _group_equal_modules(statistics, calls):
        members = {name: sketches[name] for name in names if name in sketches}
        samples = {name: _count_samples(of, calls[name]) for name, of in members.items()}
        shared = _estimate_shared(members, samples)
        for name, sketch in members.items():
            own = _estimate_call(sketch, samples[name], calls[name])
            used = shared if shared and _is_alike(sketch, own, shared) else own
            if used is not None:
                factor = calls[name] / 1e9
                value, low, high = (factor * each for each in used[:3])
                found[name] = used._replace(value=value, low=low, high=high)
    return found


def _group_equal_modules(statistics: RankStatistics, calls: Mapping[str, float]) -> list[list[str]]:
    """Group modules that seem to do the same work in each call."""
    flops = dict.fromkeys(calls, 0.0)
    for each in statistics.operators.iter_sums():
        if each.key.in_pass == Pass.FORWARD and each.module in flops:
            flops[each.module] += each.flops / calls[each.module]
    alike = group_values(((name_pattern(name), round(flops[name])), name) for name in calls)
    return list(alike.values())


def name_pattern(name: str) -> str:
    """Return a module's name with * in place of numbers, such as "blocks.*.mlp"."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _estimate_shared(
    members: Mapping[str, Sketch], samples: Mapping[str, int]
) -> ModuleTime | None:
    """Return the time of one call of equal modules; None if they are not equal, or too few."""
    whole, count = merge_sketches(members.values()), sum(samples.values())
    if len(members) < 2 or count < MIN_SAMPLES or max(samples.values()) < _MIN_STEPS:
        return None
    if whole.quantile_ns(0.75) > _MAX_SPREAD * whole.quantile_ns(0.25):
        return None
    (first, *_) = members
    return _median(whole, count)._replace(equal=name_pattern(first))


def _estimate_call(sketch: Sketch, samples: int, calls_per_step: float) -> ModuleTime | None:
    """Return the mean time of a call of one module; None with too few samples."""
    if samples < MIN_SAMPLES:
        return None
    found = _median(sketch, samples)
    if calls_per_step <= _ABOUT_ONCE:
        return found
    # The calls of a step may differ, and then their median is no mean.
    mean_ns = sketch.mean_without_outliers_ns()
    return ModuleTime(mean_ns, min(found.low, mean_ns), max(found.high, mean_ns), samples)


def _median(sketch: Sketch, samples: int) -> ModuleTime:
    """Return the median with an interval between two order statistics, which needs no model."""
    around = min(0.5 - 0.5 / samples, 0.98 / math.sqrt(samples))
    low_ns, middle_ns, high_ns = (sketch.quantile_ns(0.5 + by) for by in (-around, 0.0, around))
    low_ns = max(float(sketch.min_ns), low_ns / _BUCKET)
    return ModuleTime(middle_ns, low_ns, min(float(sketch.max_ns), high_ns * _BUCKET), samples)


def _is_alike(sketch: Sketch, own: ModuleTime | None, shared: ModuleTime) -> bool:
    """Return True if a module's samples agree with those of modules with the same work."""
    low, high = (own.low, own.high) if own else (float(sketch.min_ns), float(sketch.max_ns))
    return low <= _BUCKET * shared.high and shared.low <= _BUCKET * high


def _find_nearest_inside(name: str, timed: Mapping[str, float], roots: list[str]) -> list[str]:
    """Return the outermost timed modules inside of a module.

    A single root module contains all others, though their names do not begin with its name.
    """
    inside = [
        each for each in timed if each != name and (roots == [name] or each.startswith(f"{name}."))
    ]
    return [each for each in inside if not any(each.startswith(f"{one}.") for one in inside)]


def _subtract(whole: ModuleTime, inner: list[ModuleTime]) -> ModuleTime:
    """Return the rest of a time. Errors are independent."""
    rest = max(0.0, whole.value - sum(each.value for each in inner))
    less = math.hypot(whole.value - whole.low, *(each.high - each.value for each in inner))
    more = math.hypot(whole.high - whole.value, *(each.value - each.low for each in inner))
    samples = min([whole.samples, *(each.samples for each in inner)])
    return whole._replace(value=rest, low=max(0.0, rest - less), high=rest + more, samples=samples)
