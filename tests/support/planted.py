"""Synthetic jobs for the judge: rows of all ranks of a synchronous job, with planted faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchlens_perf.analysis.statistics.step_bins import BinBatch
from torchlens_perf.analysis.statistics.steps import zero_device_columns
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.placement import Placement

MS = 1e6
WORK_MS = {
    "data": 10.0,
    "forward": 60.0,
    "recompute": 0.0,
    "backward": 110.0,
    "optimizer": 15.0,
    "host": 5.0,
}
WORK_NS = sum(WORK_MS.values()) * MS
# Transfer time of the gradients once all ranks have arrived.
TRANSFER_NS = 4 * MS
COMPUTE = [OWN_PARTS.index("forward"), OWN_PARTS.index("backward")]


@dataclasses.dataclass
class Job:
    """The rows (times of steps) of all ranks of a job.

    A row lasts as long as the work of the slowest rank, for which the other ranks wait.
    """

    parts_ns: np.ndarray
    """Shape [ranks, rows, len(OWN_PARTS)]."""
    ready_ns: np.ndarray
    """Shape [ranks, rows], NaN if not measured."""
    workload: np.ndarray
    flags: np.ndarray

    @classmethod
    def of(
        cls, ranks: int, rows: int, *, seed: int = 0, noise: float = 0.01, deviations: Any = None
    ) -> Job:
        """Return a healthy job.

        `noise` is the relative standard deviation of a rank's work between rows.

        `deviations`, [ranks, rows] in standard deviations, replaces the normal distribution.
        """
        if deviations is None:
            deviations = np.random.default_rng([ranks, rows, seed]).standard_normal((ranks, rows))
        usual = np.array([WORK_MS[part] for part in OWN_PARTS]) * MS
        parts_ns = usual * np.maximum(1 + noise * deviations, 0.2)[:, :, None]
        empty = np.full((ranks, rows), np.nan)
        return cls(parts_ns, empty, empty.copy(), np.zeros((ranks, rows), np.int64))

    @property
    def ranks(self) -> int:
        return len(self.parts_ns)

    @property
    def rows(self) -> int:
        return self.parts_ns.shape[1]

    def slow(
        self, rank: int, excess_ms: float, phase: str = "forward", rows: Any = slice(None)
    ) -> Job:
        """Add time to the given rows of a rank, in place.

        The phase "compute" spreads the excess over forward and backward.
        """
        shares = {"forward": 6 / 17, "backward": 11 / 17} if phase == "compute" else {phase: 1.0}
        for part, share in shares.items():
            self.parts_ns[rank, rows, OWN_PARTS.index(part)] += share * excess_ms * MS
        return self

    def load(self, lengths: np.ndarray, *, told: bool) -> Job:
        """Scale forward and backward by input lengths [ranks, rows].

        With `told`, the job also reports the input lengths to the judge.
        """
        self.parts_ns[:, :, COMPUTE] *= lengths[:, :, None]
        if told:
            self.workload = np.round(4096 * lengths)
        return self

    def block(self, ranks: Sequence[int] | None = None, rows: slice = slice(None)) -> BinBatch:
        """Return a batch with the rows of the given ranks."""
        chosen = np.arange(self.ranks) if ranks is None else np.array(ranks)
        own_ns = self.parts_ns.sum(axis=2) + np.nan_to_num(self.ready_ns)
        duration_ns = np.broadcast_to(own_ns.max(axis=0) + TRANSFER_NS, own_ns.shape)
        return BinBatch(
            width=1,
            ranks=chosen,
            key=np.broadcast_to(np.arange(self.rows), own_ns.shape)[chosen, rows],
            flags=self.flags[chosen, rows],
            duration_ns=duration_ns[chosen, rows],
            wait_ns=(duration_ns - own_ns)[chosen, rows],
            ready_ns=self.ready_ns[chosen, rows],
            workload=self.workload[chosen, rows],
            parts_ns=self.parts_ns[chosen, rows],
            **zero_device_columns(self.parts_ns[chosen, rows], self.ready_ns[chosen, rows]),
        )

    def rows_of(self, rank: int, rows: slice = slice(None)) -> BinBatch:
        """Return one rank's rows in the form that its StepBinner produces."""
        return self.block([rank], rows)

    def judge(self) -> Findings:
        """Return the judge's findings on all rows after the end of the job."""
        judge = StragglerDetector()
        judge.add_bin_batch("", self.block())
        return judge.judge(final=True)


def wider(rows: BinBatch, width: int) -> BinBatch:
    """Return means over `width` rows of one step each, aligned to multiples of `width`."""
    count = len(rows) // width

    def grouped(values: np.ndarray) -> np.ndarray:
        return values[:, : count * width].reshape(1, count, width, *values.shape[2:])

    means = {
        name: grouped(getattr(rows, name)).mean(axis=2)
        for name in (
            "duration_ns",
            "parts_ns",
            "wait_ns",
            "ready_ns",
            "workload",
            "issue_ns",
            "issue_ready_ns",
            "lag_ns",
        )
    }
    flags = np.bitwise_or.reduce(grouped(rows.flags), axis=2)
    key = grouped(rows.key)[:, :, 0] // width
    return BinBatch(width=width, ranks=rows.ranks, key=key, flags=flags, **means)


def part_of(rows: BinBatch, first: int, end: int) -> BinBatch:
    """Return the batch's rows from position `first` up to `end`."""
    return rows.select_rows(slice(first, end))


def places(ranks: int, node_size: int = 8, **coordinates: Sequence[int]) -> dict[int, Placement]:
    """Place ranks on nodes of `node_size` ranks, starting with "node-0".

    `coordinates` has one list per dimension of the device mesh.
    """
    return {
        rank: Placement(
            f"node-{rank // node_size}",
            "",
            {name: values[rank] for name, values in coordinates.items()},
        )
        for rank in range(ranks)
    }
