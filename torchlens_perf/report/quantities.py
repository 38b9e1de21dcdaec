"""Quantities as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A duration for people: three figures and a unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            value = seconds / scale
            digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def percent(share: float) -> str:
    """A share for people."""
    return f"{share:.0%}" if abs(share) >= 0.1 else f"{share:.1%}"
