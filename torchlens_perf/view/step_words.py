"""Sentences on the number and the duration of steps, and on this tool's share. Pure."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_duration,
    format_percent,
    format_rounded,
)
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.report import Quality, Report, Trend

_FLAT = 0.03


def describe_overhead(quality: Quality) -> str:
    """Return this tool's share of the step time with its interval, and what it times less often.

    A small measured share is not shown as zero.
    """
    shares = quality["overhead_share"], quality["overhead_low"], quality["overhead_high"]
    if shares[0] is None:
        return "not measured"
    text, *ends = [
        f"{each:.2%}" if each >= 0.0001 or not each else "<0.01%"
        for each in shares
        if each is not None
    ]
    interval = f" (at least {', at most '.join(ends)})" if set(ends) - {text} else ""
    periods = {"modules": quality["module_period"], "device phases": quality["phase_period"]}
    thinned = "".join(
        f"; {what} timed in 1 of {period} steps" for what, period in periods.items() if period > 1
    )
    return f"{text} of step time{interval}{thinned}"


def step_count_text(report: Report) -> str:
    """Return the number of steps as text: "150 steps", or "1 forward pass" in inference.

    For a process that makes several trainings, the text has the one that the report covers.
    """
    count = format_count(
        report["steps"]["count"], "forward pass" if report["steps"]["inference"] else "step"
    )
    shown = [each["number"] for each in report["trainings"] if each["is_shown"]]
    return f"{count} of training {shown[0]} of {len(report['trainings'])}" if shown else count


def describe_steps(report: Report) -> str:
    """Return the number of steps and the step times as text."""
    times = describe_step_times(report) if report["steps"]["count"] else []
    return f"{step_count_text(report)}{': ' * bool(times)}{', '.join(times)}"


def describe_step_times(report: Report) -> list[str]:
    """Return texts on the step time, the steps per second, and the trend."""
    steps = report["steps"]
    if steps["p50_s"] is None:
        every = "all of them " if steps["count"] > 1 else ""
        longest = format_duration(steps["warm_up_max_s"] or 0.0)
        return [f"{every}warm-up, the longest {longest}" if steps["warm_up_max_s"] else "warm-up"]
    quantiles = (("p50", steps["p50_s"]), ("p95", steps["p95_s"]), ("max", steps["max_s"]))
    words = [f"{name} {format_duration(value)}" for name, value in quantiles if value is not None]
    if steps["mean_s"]:
        words.append(f"{format_rounded(1 / steps['mean_s'])} steps/s")
    if steps["trend"] is not None:
        words.append(_describe_trend(steps["trend"]))
    words += ["device clock"] * (steps["by"] == DEVICE)
    return [*words, *[f"{steps['micro_steps']} micro-steps"] * (steps["micro_steps"] > 1)]


def _describe_trend(trend: Trend) -> str:
    change = trend["change"]
    if abs(change) < _FLAT:
        return "trend flat"
    if not trend["is_gradual"]:
        return "no trend"
    return f"trend {'slower' if change > 0 else 'faster'} {format_percent(abs(change))}"
