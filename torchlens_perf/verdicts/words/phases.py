"""Names, times and shares of the parts of a step for sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.run.records import WITHOUT_GRADIENTS


def phase_name(phase: str) -> str:
    """Return the name of a part of the step for use in a sentence."""
    return {
        "data": "data loading",
        "forward": "the forward pass",
        WITHOUT_GRADIENTS: WITHOUT_GRADIENTS,
        "recompute": "recomputing activations",
        "backward": "the backward pass",
        "optimizer": "the optimizer",
        "host": "host code",
        "compute": "computing (forward and backward)",
        "cpu": "CPU contention",
        "communication": "comm wait",
        "tool": "torchlens_perf",
        "gap": "the gaps between the phases, in which its device waits for its host",
    }[phase]


def within_sentence(name: str) -> str:
    """Return a name that begins a sentence as it is inside of one: "data loading", "CPU contention"."""
    return name if name[1].isupper() else name[0].lower() + name[1:]


def format_phases(parts_s: Mapping[str, float]) -> str:
    """Return the parts with their times, such as "the forward pass 12.0 ms, data loading 3.0 ms"."""
    return ", ".join(
        f"{phase_name(phase)} {format_duration(seconds)}" for phase, seconds in parts_s.items()
    )


def format_share(seconds: float, step_s: float) -> str:
    """Return a time of the step as a share, such as "17% (24.0 ms)"."""
    return f"{format_percent(seconds / step_s)} ({format_duration(seconds)})"
