"""A rank of this node, as far as other nodes' sidecars are to know it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.sidecar.nodes import summary

if TYPE_CHECKING:
    from torchlens_perf.analysis.collectives.hang import Progress
    from torchlens_perf.analysis.statistics.step_bins import StepBins
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.verdicts.stragglers.placement import Placement


@dataclasses.dataclass
class LocalRank:
    """A rank of this node."""

    identity: Identity
    place: Placement
    world_size: int
    progress: Progress | None = None
    unsent: list[StepBins] = dataclasses.field(default_factory=list)
    modules_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    signals: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stack_file: str = ""
    ended: bool = False
    end_sent: bool = False


def usual_step_s(durations_ns: Sequence[float]) -> float:
    """The median of the last steps; 0 until there are ten."""
    return float(np.median(durations_ns)) / 1e9 if len(durations_ns) >= 10 else 0.0


def next_rows(unsent: list[StepBins]) -> StepBins | None:
    """The next rows, as many as fit into a summary."""
    if not unsent:
        return None
    first, *later = list(summary.windows(unsent.pop(0)))
    unsent[:0] = later
    return first
