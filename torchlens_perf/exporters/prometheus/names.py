"""Convert names of OpenTelemetry metrics, units and attributes to Prometheus names. Pure.

The names follow OpenTelemetry's rules, so one dashboard works with both scraped and OTLP metrics:
https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/
"""

from __future__ import annotations

import re

_UNITS = {
    "s": "seconds", "By": "bytes", "W": "watts", "J": "joules", "Cel": "celsius", "Hz": "hertz",
    "By/s": "bytes_per_second",
}  # fmt: skip
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")


def prometheus_unit_suffix(unit: str, *, gauge: bool) -> str:
    """Return the unit suffix of a metric's name, or "". Annotations such as {step} have no suffix.

    The suffix of a gauge with unit 1 is "ratio". A sum with unit 1 is a count and has no suffix.
    """
    if unit == "1":
        return "ratio" if gauge else ""
    return _UNITS.get(unit, "")


def prometheus_name(name: str, unit: str = "") -> str:
    """Return the Prometheus name of a metric or attribute. unit: suffix of the unit."""
    found = _NOT_IN_NAMES.sub("_", name)
    if found[:1].isdigit():
        found = f"_{found}"
    return f"{found}_{unit}" if unit and not found.endswith(f"_{unit}") else found
