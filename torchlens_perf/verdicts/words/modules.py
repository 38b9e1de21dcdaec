"""Name the module whose work takes most of a step. Pure."""

from __future__ import annotations

from typing import NamedTuple

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.records import PASSES
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.report import Facts, Module
from torchlens_perf.verdicts.words.stragglers import module_label

_TRACE = "torchlens-perf capture, while the job runs"


class LargestModules(NamedTuple):
    """Modules that do the same work, or a single module."""

    name: str
    """A name, or a pattern of the names of several modules."""
    rows: list[Module]
    seconds: float
    """Device time of all of them in a step."""


def computing_action(report: Facts) -> str:
    """Return the advice to look at the largest module, and how to time modules inside it."""
    rows = report["modules"]
    if not rows:
        return "pass the model to watch(), which then times its modules."
    if report["run"]["judged_by"] == DEVICE and not (rows[0]["is_root"] and len(rows) == 1):
        return _device_action(report)
    if rows[0]["name"] == PASSES:
        return f"make fewer of the {PASSES}, or use larger batches in them."
    name = module_label(rows[0]["name"])
    most = (
        "the module with the most time of its own"
        f" ({format_duration(rows[0]['own_s_per_step'])} of the forward pass in each step)"
    )
    if rows[0]["is_root"] and len(rows) > 1:
        return (
            f"look at the code of {name}'s own forward(), outside of its modules: time parts of"
            ' it with torchlens_perf.section("name").'
        )
    if not rows[0]["is_root"]:
        return f"look first at {name}, {most}{_deeper(rows[0])}."
    if not report["run"]["deeper_modules"]:
        return f"look at a trace of {name}: {_TRACE}. No module inside can be timed."
    return f"look first at {name}, {most}; modules=1 shows what is inside."


def _device_action(report: Facts) -> str:
    """Return the advice on a device, whose times of modules rest on samples."""
    found = find_largest_on_device(report)
    if found is not None:
        row, step = found.rows[0], f"{format_duration(found.seconds)} a step"
        count = f"{len(found.rows)} equal modules, {step}" if len(found.rows) > 1 else step
        samples = f"{count}, {row['device_samples']} samples"
        deeper = _deeper(row, found.name)
        return f"look first at {module_label(found.name)}, the largest by device time ({samples}){deeper}."
    inner = {row["name"]: row for row in report["modules"] if not row["is_root"]}
    most = next((each for each in report["utilization"].modules if each.name in inner), None)
    if most is None:
        return f"look at a trace: {_TRACE}. The device times of modules have too few samples."
    return (
        f"look first at {module_label(most.name)}, which has the most FLOPs of all timed modules"
        f" ({format_percent(most.share)} of a step's){_deeper(inner[most.name])}."
    )


def _deeper(row: Module, name: str = "") -> str:
    return f'; modules=["{name or row["name"]}.*"] shows what is inside' * row["has_untimed"]


def find_largest_on_device(report: Facts) -> LargestModules | None:
    """Return the modules that take the most device time.

    Return None if a module without enough samples may take more.
    """
    groups = group_values(
        (row["device_equal"] or row["name"], row)
        for row in report["modules"]
        if row["device_own_s_per_step"] is not None
    )
    found = [
        LargestModules(
            name if len(rows) > 1 else rows[0]["name"],
            rows,
            sum(row["device_own_s_per_step"] or 0.0 for row in rows),
        )
        for name, rows in groups.items()
    ]
    largest = max(found, key=lambda each: each.seconds, default=None)
    # A module without inner modules may take longer, if its device time is unknown.
    if largest is None or any(
        (row["device_s"]["max_s"] or 0.0) * row["calls_per_step"] > largest.seconds
        for row in report["modules"]
        if row["device_own_s_per_step"] is None
        and row["device_s"] is not None
        and not any(other["name"].startswith(f"{row['name']}.") for other in report["modules"])
    ):
        return None
    return largest
