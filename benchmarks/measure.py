"""Timing on a machine with other load: all variants alternate in one run, and are compared as
ratios with confidence intervals.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

UNROLLED = 20


def per_operation_ns(
    statement: str, names: Mapping[str, object], rounds: int
) -> Callable[[], float]:
    """Return a function that runs the statement UNROLLED times per round and returns the ns of one
    execution.
    """
    body = "".join(f"        {line}\n" for line in statement.splitlines())
    source = (
        f"def timed():\n    start = now()\n    for _ in range({rounds}):\n{body * UNROLLED}"
        "    return now() - start\n"
    )
    scope = {**names, "now": time.perf_counter_ns}
    exec(source, scope)
    timed: Callable[[], int] = scope["timed"]  # type: ignore[assignment]
    return lambda: timed() / rounds / UNROLLED


def interleaved(
    variants: Mapping[str, Callable[[], float]], rounds: int, seed: int = 1
) -> dict[str, list[float]]:
    """Time each variant once per round, in a shuffled order. Return each variant's times by round."""
    order, draw = list(variants), random.Random(seed)
    values: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            values[name].append(variants[name]())
    return values


def ratio_interval(
    above: Sequence[float], below: Sequence[float], seed: int = 1
) -> tuple[float, float, float]:
    """Return the median of the rounds' ratios, and its 95 % interval."""
    return median_interval([a / b for a, b in zip(above, below, strict=True)], seed)


def median_interval(values: Sequence[float], seed: int = 1) -> tuple[float, float, float]:
    """Return the median, and its 95 % interval from 2000 bootstrap samples."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]


def share_interval(hits: int, runs: int) -> tuple[float, float, float]:
    """Return a share, and its 95 % interval by Wilson's score."""
    z, share = 1.96, hits / runs
    middle = (share + z * z / (2 * runs)) / (1 + z * z / runs)
    half = (
        z / (1 + z * z / runs) * math.sqrt(share * (1 - share) / runs + z * z / (4 * runs * runs))
    )
    return share, max(0.0, middle - half), min(1.0, middle + half)


class Table:
    """A Markdown table that prints each row at once, and whether the row meets its bar (limit)."""

    def __init__(self, *columns: str) -> None:
        self.missed = 0
        self._print(columns)
        self._print(["---"] * len(columns))

    def row(self, *cells: object) -> None:
        self._print([str(cell) for cell in cells])

    def bar(self, met: bool) -> str:
        """Return the cell for a bar that is met or missed, and count missed bars."""
        self.missed += not met
        return "met" if met else "**missed**"

    def _print(self, cells: Sequence[str]) -> None:
        print("| " + " | ".join(cells) + " |", flush=True)
