"""A sketch as the report shows it. Pure."""

from __future__ import annotations

from torchlens_perf.sketch import Sketch

_QUANTILES = {"p50_s": 0.5, "p95_s": 0.95, "p99_s": 0.99}


def distribution(sketch: Sketch) -> dict[str, float | None]:
    """p50_s, p95_s, p99_s, max_s and mean_s; null where there is no value."""
    if not sketch.count:
        return {**dict.fromkeys(_QUANTILES), "max_s": None, "mean_s": None}
    quantiles: dict[str, float | None] = {name: sketch.quantile_ns(q) / 1e9 for name, q in _QUANTILES.items()}
    return {**quantiles, "max_s": sketch.largest / 1e9, "mean_s": sketch.mean_ns() / 1e9}
