"""Quantiles, maximum and mean of a sketch for the report. Pure."""

from __future__ import annotations

from torchlens_perf.run.sketch import Sketch
from torchlens_perf.verdicts.words.report import Distribution


def summarize_sketch(sketch: Sketch) -> Distribution:
    """Return p50_s, p95_s, p99_s, max_s and mean_s; None if the sketch is empty."""
    if not sketch.count:
        return {"p50_s": None, "p95_s": None, "p99_s": None, "max_s": None, "mean_s": None}
    return {
        "p50_s": sketch.quantile_ns(0.5) / 1e9,
        "p95_s": sketch.quantile_ns(0.95) / 1e9,
        "p99_s": sketch.quantile_ns(0.99) / 1e9,
        "max_s": sketch.max_ns / 1e9,
        "mean_s": sketch.mean_ns() / 1e9,
    }
