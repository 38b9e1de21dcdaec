"""What a metric, a unit and an attribute of OpenTelemetry are called in Prometheus. Pure.

As OpenTelemetry has it, so that one dashboard fits a scrape and OTLP alike:
https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/
"""

from __future__ import annotations

import re

_UNITS = {
    "s": "seconds", "By": "bytes", "W": "watts", "J": "joules", "Cel": "celsius", "Hz": "hertz",
    "By/s": "bytes_per_second",
}  # fmt: skip
_RATIO = "ratio"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")


def prometheus_unit(unit: str, *, gauge: bool) -> str:
    """The unit as a name ends in it; "" where it has none, as annotations such as {step} are no units.

    A gauge of unit 1 is a ratio; a sum of it is a number of things.
    """
    if unit == "1":
        return _RATIO if gauge else ""
    return _UNITS.get(unit, "")


def prometheus_name(name: str, unit: str = "") -> str:
    """A metric's or an attribute's name. unit: as prometheus_unit() has it."""
    found = _NOT_IN_NAMES.sub("_", name)
    if found[:1].isdigit():
        found = f"_{found}"
    return f"{found}_{unit}" if unit and not found.endswith(f"_{unit}") else found


def series_name(name: str, unit: str, *, kind: str) -> str:
    """The name of a metric's samples as a query has it, without _bucket, _sum and _count.

    unit: OpenTelemetry's. kind: counter, gauge, updown or histogram.
    """
    found = prometheus_name(name, prometheus_unit(unit, gauge=kind == "gauge"))
    return f"{found}_total" if kind == "counter" else found
