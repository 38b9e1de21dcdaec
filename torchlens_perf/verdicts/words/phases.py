"""Names of the parts of a step for sentences. Pure."""

from __future__ import annotations


def phase_name(phase: str) -> str:
    """Return the name of a part of the step for use in a sentence."""
    return {
        "data": "data loading",
        "forward": "the forward pass",
        "recompute": "recomputing activations",
        "backward": "the backward pass",
        "optimizer": "the optimizer",
        "host": "host code",
        "compute": "computing, both forward and backward",
        "cpu": "waiting for a CPU",
        "communication": "waiting in communication",
        "tool": "this tool",
        "gap": "the gaps between the phases, in which its device waits for its host",
    }[phase]
