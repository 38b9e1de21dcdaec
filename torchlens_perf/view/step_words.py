"""Sentences on the number and the duration of steps, and on this tool's share. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_duration,
    format_percent,
    format_rounded,
)
from torchlens_perf.run.verdicts import format_overhead
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.verdict import describe_warm_up

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Quality, Report

_FLAT = 0.03


def describe_overhead(quality: Quality) -> str:
    """Return this tool's share of the step time, and how often it times modules, as text."""
    return format_overhead(
        quality["overhead_share"],
        quality["overhead_low"],
        quality["overhead_high"],
        quality["module_period"],
    )


def step_count_text(report: Report) -> str:
    """Return the number of steps as text: "150 steps", or "1 forward pass" in inference."""
    return format_count(
        report["steps"]["count"], "forward pass" if report["steps"]["inference"] else "step"
    )


def describe_step_times(report: Report) -> list[str]:
    """Return texts on the step time, the steps per second, and the trend."""
    steps = report["steps"]
    if steps["p50_s"] is None:
        every = "all of them " if steps["count"] > 1 else ""
        return [f"{every}warm-up{describe_warm_up(steps)}"]
    quantiles = (("p50", steps["p50_s"]), ("p95", steps["p95_s"]), ("max", steps["max_s"]))
    words = [f"{name} {format_duration(value)}" for name, value in quantiles if value is not None]
    if steps["mean_s"]:
        words.append(f"{format_rounded(1 / steps['mean_s'])} steps/s")
    if steps["trend"] is not None:
        change = steps["trend"]["change"]
        slower = f"{'slower' if change > 0 else 'faster'} {format_percent(abs(change))}"
        words.append(f"trend {'flat' if abs(change) < _FLAT else slower}")
    words += ["device clock"] * (steps["by"] == DEVICE)
    return [*words, *[f"{steps['micro_steps']} micro-steps"] * (steps["micro_steps"] > 1)]
