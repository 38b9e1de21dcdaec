"""Step tables and records made by hand, as input for computations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchlens_perf.analysis.statistics.steps import zero_device_columns
from torchlens_perf.run.records import PARTS, StepTable
from torchlens_perf.run.ring import Kind, record_dtype

MS = 1_000_000


def step_table(
    parts_ms: Sequence[dict[str, float]], first_step: int = 0, flags: int = 0, memory: int = 0
) -> StepTable:
    """Return steps with the given parts in ms. A step lasts as long as the sum of its parts."""
    parts_ns = np.array(
        [[round(step.get(part, 0) * MS) for part in PARTS] for step in parts_ms], np.int64
    )
    parts_ns = parts_ns.reshape(len(parts_ms), len(PARTS))
    count = len(parts_ms)
    duration_ns = parts_ns.sum(axis=1)
    return StepTable(
        step=np.arange(first_step, first_step + count),
        start_ns=np.cumsum(duration_ns) - duration_ns,
        duration_ns=duration_ns,
        parts_ns=parts_ns,
        memory_bytes=np.full(count, memory),
        micro_steps=np.ones(count, np.int64),
        flags=np.full(count, flags),
        workload=np.full(count, -1),
        cpu_ns=np.full((count, len(PARTS)), -1),
        ready_ns=np.full_like(parts_ns, -1),
        **zero_device_columns(parts_ns, np.full_like(parts_ns, -1)),
    )


def mixed_table(
    steps: Sequence[dict[str, Any]], first_step: int = 0, noise: float = 0.0
) -> StepTable:
    """Return steps that differ: each has parts in ms, "flags", and "cpu" for CPU contention.

    CPU contention is a share of the forward part, or of the part that "cpu_in" names.

    `noise` is the standard deviation of the logarithm of a step's duration.
    """
    scales = np.exp(noise * np.random.default_rng(0).standard_normal(len(steps)))
    made = step_table(
        [
            {part: step.get(part, 0.0) * scale for part in PARTS}
            for step, scale in zip(steps, scales, strict=True)
        ],
        first_step,
    )
    ready_ns = np.full_like(made.parts_ns, -1)
    for row, step in enumerate(steps):
        if "cpu" in step:
            ready_ns[row] = 0
            ready_ns[row, PARTS.index(step.get("cpu_in", "forward"))] = step["cpu"] * MS
    flags = np.array([int(step.get("flags", 0)) for step in steps], np.int64)
    return dataclasses.replace(made, flags=flags, ready_ns=ready_ns)


def records(rows: Sequence[tuple[Kind, int, int, int]]) -> np.ndarray:
    """Return ring records made from tuples (kind, name_id, step, duration_ns)."""
    made = np.zeros(len(rows), record_dtype())
    for record, (kind, name_id, step, duration_ns) in zip(made, rows, strict=True):
        record["kind"], record["name_id"], record["step"], record["duration_ns"] = (
            kind,
            name_id,
            step,
            duration_ns,
        )
    return made
