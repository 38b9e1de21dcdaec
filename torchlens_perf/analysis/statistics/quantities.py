"""Format quantities and names for display."""

from __future__ import annotations

from torchlens_perf.errors import printable as printable


def format_duration(seconds: float) -> str:
    """Format a duration with three significant digits and a unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            value = seconds / scale
            digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def format_percent(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.1 else f"{share:.1%}"


def format_change(share: float) -> str:
    """Format a relative change with its sign. A change that rounds to zero is "+0.0%"."""
    return f"{'-' if share <= -0.0005 else '+'}{format_percent(abs(share))}"


def format_rounded(value: float) -> str:
    """Format a number with three significant digits or all digits of its whole part, without an
    exponent: "4,540", "19.4", "4.00". A whole number has no point.
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 or value % 1 == 0 else f"{value:#.3g}".rstrip(".")


def format_run_duration(seconds: float) -> str:
    """Format the duration of a run: "2 h 01 min", "4 min 10 s".

    Durations below a minute are formatted by format_duration().
    """
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else format_duration(seconds)


def format_bytes(count: float, unit: str) -> str:
    """Format a number of bytes, or bytes per second, with a decimal prefix."""
    for prefix in ("", "K", "M", "G", "T"):
        if count < 1000 or prefix == "T":
            return (
                f"{count:.0f} {prefix}{unit}"
                if not prefix or count >= 100
                else f"{count:.1f} {prefix}{unit}"
            )
        count /= 1000
    raise AssertionError("unreachable")


def format_coverage(share: float, *, any_step: bool) -> str:
    """Describe the fraction of steps that were recorded completely.

    any_step: False if no step was recorded. `share` is then ignored.
    """
    return f"{share:.1%} of steps complete" if any_step else "no step was recorded"


def format_count(count: int, noun: str) -> str:
    """Format a number with a noun: "1 step", "2 steps", "3 passes"."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def format_duration_or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)
