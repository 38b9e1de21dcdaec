"""Causes of a slow rank, from its signals compared with other ranks' and with its own past. Pure.

A cause that takes time must explain a share of the rank's excess. The explained share is the
additional time of the cause's signal, compared with other ranks, divided by the excess. Link errors
and similar signals take no measurable time. Such signals are reported if only the slow rank has
them. Without a cause, the diagnosis lists the checks, because a guess would mislead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from torchlens_perf.verdicts.causes.metrics import CLOCKS, METRICS, measured_signals
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import Cause, Diagnosis

MAX_CAUSES = 3
# A cause is named if it explains at least this share of the excess.
MIN_EXPLAINED = 0.3
# Other programs are named if they keep at least this share of the rank's CPUs, or its GPU, busy.
_MIN_NEIGHBOURS = 0.1
_MIN_FAULTS_PER_S = 20
_MIN_RETRIES_PER_STEP = 0.05
THROTTLES = ("thermal_share", "hw_slowdown_share", "power_share")
"""Signals of the reasons for which a GPU is throttled."""
# Clocks of healthy ranks differ by less than this share.
_CLOCK_LOWER = 0.03


WAITS_FOR_CPU = "waits for a CPU"
# The names of checks in messages. A check was made if its signal was measured.
_SUBJECTS = (
    ("garbage collection", "gc_share"),
    (WAITS_FOR_CPU, "cpu_wait_share"),
    ("waits for a disk", "disk_wait_share"),
    ("memory pressure", "major_faults_per_s"),
    ("CPU clocks", "cpu_clock_share"),
    ("GPU clocks and throttling", "sm_clock_mhz"),
    ("GPU errors", "xids_per_s"),
    ("PCIe", "pcie_replays_per_s"),
    ("NVLink", "nvlink_errors_per_s"),
    ("InfiniBand", "link_errors_per_s"),
    ("the device allocator", "alloc_retries_per_step"),
)


@dataclasses.dataclass(frozen=True)
class _SlowRankCase:
    """A slow rank with its episode, its signals while it is slow, and usual signals."""

    mine: Mapping[str, float]
    usual: Mapping[str, float]
    """The other ranks' median, or the rank's own past if that is nearer to `mine`. A cause must
    exceed both."""
    others: Mapping[str, float]
    episode: Episode
    details: Mapping[str, str]

    def excess_of(self, signal: str) -> float:
        """Return by how much a signal exceeds its usual value; 0 if not measured."""
        if signal not in self.mine or signal not in self.usual:
            return 0.0
        return self.mine[signal] - self.usual[signal]

    def share_of_excess(self, share_of_time: float) -> float:
        """Convert a share of the step to a share of the rank's excess."""
        return share_of_time * self.episode.step_ns / max(1.0, self.episode.excess_ns)

    def share_explained_by_clock(self, lower: float) -> float:
        """Return the share of the excess explained by a clock that is `lower` below usual."""
        return lower * self.episode.work_ns / max(1.0, self.episode.excess_ns)

    def cause(
        self, kind: str, explains: float | None, *signals: str, usual: str = "", **about: str
    ) -> list[Cause]:
        """Return the causes that a rule has found: one, with the values of these signals.

        usual: the signal whose usual value is part of the evidence.
        """
        found = {name: self.mine[name] for name in signals if name in self.mine}
        others = {f"others_{name}": self.others[name] for name in signals if name in self.others}
        own = {f"usual_{usual}": self.usual[usual]} if usual else {}
        return [Cause(kind, explains, found | others | own, {**self.details, **about})]


def diagnose(
    episode: Episode,
    during: Mapping[int, npt.NDArray[np.float32]],
    before: npt.NDArray[np.float32] | None,
    together: Collection[int] = (),
    details: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Return the causes of an episode.

    during: mean signals of each compared rank over the steps of the episode.
    before: the slow rank's usual signals before the episode.
    together: ranks that are slow at the same time. The slow rank is not compared with these ranks.
    details: names on the rank's node, with the keys "neighbour", "control_group" and "gpu".
    """
    rank = episode.rank
    if rank not in during:
        return Diagnosis((), (), tuple(subject for subject, _ in _SUBJECTS), {}, {})
    mine = measured_signals(during[rank])
    others = _median_signals(
        [values for other, values in during.items() if other != rank and other not in together]
    )
    usual = dict(others)
    if before is not None:
        for name, value in measured_signals(before).items():
            nearer = min if name in CLOCKS else max
            usual[name] = nearer(usual[name], value) if name in usual else value
    case = _SlowRankCase(mine, usual, others, episode, details or {})
    found = [cause for rule in _RULES for cause in rule(case)]
    found.sort(key=lambda cause: -(MIN_EXPLAINED if cause.explains is None else cause.explains))
    subjects = [
        each for each in _SUBJECTS if not (episode.phase == "cpu" and each[0] == WAITS_FOR_CPU)
    ]
    looked_at = tuple(subject for subject, signal in subjects if signal in mine)
    not_measured = tuple(subject for subject, signal in _SUBJECTS if signal not in mine)
    return Diagnosis(tuple(found[:MAX_CAUSES]), looked_at, not_measured, mine, others)


def _median_signals(rows: list[npt.NDArray[np.float32]]) -> dict[str, float]:
    if not rows:
        return {}
    table = np.stack(rows)
    measured = np.flatnonzero(~np.isnan(table).all(axis=0))
    return {METRICS[i]: float(np.nanmedian(table[:, i])) for i in measured.tolist()}


# -- rules: each returns the causes that it finds in a case


def _check_garbage_collection(case: _SlowRankCase) -> list[Cause]:
    explains = case.share_of_excess(case.excess_of("gc_share"))
    return [] if explains < MIN_EXPLAINED else case.cause("gc", explains, "gc_share")


def _check_cpu_shortage(case: _SlowRankCase) -> list[Cause]:
    """Return the reason why the rank lacks CPU time as a cause.

    Recorded waits for a CPU are not part of work. Waits can therefore explain an excess in two
    cases only: in the phase "cpu", and in steps that are too short to record them.
    """
    if case.episode.phase != "cpu" and "asleep_share" in case.mine:
        return []
    waits = case.excess_of("cpu_wait_share")
    explains = case.share_of_excess(waits)
    if explains < MIN_EXPLAINED:
        return []
    # Ranks without a quota have no cpu_quota_share, and other programs are sampled only while a
    # rank waits.
    quota = case.mine.get("cpu_quota_share", 0.0) - case.usual.get("cpu_quota_share", 0.0)
    neighbours = case.mine.get("neighbour_share")
    if quota >= max(0.1, waits / 2):
        return case.cause("cpu_quota", explains, "cpu_quota_share", "cpu_wait_share")
    kind = "no_cpu"
    if neighbours is not None:
        # This load is not compared with that of other ranks, which may have as much but wait less.
        kind = "busy_neighbour" if neighbours >= _MIN_NEIGHBOURS else "own_threads"
    return case.cause(kind, explains, "cpu_wait_share", "neighbour_share")


_MEMORY_SIGNALS = (
    "major_faults_per_s", "refaults_per_s", "memory_limit_share", "memory_stall_share", "disk_wait_share",
    "asleep_share", "kernel_share",
)  # fmt: skip


def _check_disk_and_memory(case: _SlowRankCase) -> list[Cause]:
    """Return slow storage or memory pressure as a cause.

    A rank that waits for evicted pages looks as if it waited for files. Only page faults and a full
    control group show the difference.
    """
    waits = case.excess_of("disk_wait_share")
    # The total time asleep is measured exactly. The time asleep for a disk is only sampled.
    slept = case.excess_of("asleep_share") if "asleep_share" in case.mine else waits
    explains = case.share_of_excess(slept)
    if _has_memory_pressure(case):
        # Reclaiming pages also takes CPU time in the kernel.
        reclaims = explains + case.share_of_excess(max(0.0, case.excess_of("kernel_share")))
        if reclaims >= MIN_EXPLAINED:
            evicts = case.excess_of("refaults_per_s") >= _MIN_FAULTS_PER_S
            reason = "evicted_pages" if evicts else "memory_pressure"
            return case.cause("memory_pressure", reclaims, *_MEMORY_SIGNALS, reason=reason)
    if explains < MIN_EXPLAINED or waits < slept / 3:
        return []
    return case.cause(
        "slow_storage", explains, "disk_wait_share", "asleep_share", "major_faults_per_s"
    )


def _has_memory_pressure(case: _SlowRankCase) -> bool:
    """Return True if the rank waits for evicted pages, rather than for its first read of pages."""
    if case.excess_of("major_faults_per_s") < _MIN_FAULTS_PER_S:
        return False
    if "refaults_per_s" in case.mine or "memory_stall_share" in case.mine:
        return (
            case.excess_of("refaults_per_s") >= _MIN_FAULTS_PER_S
            or case.excess_of("memory_stall_share") >= 0.05
        )
    return case.mine.get("memory_limit_share", 0.0) >= 0.9


def _check_cpu_clock(case: _SlowRankCase) -> list[Cause]:
    lower = _clock_deficit(case, "cpu_clock_share")
    explains = case.share_explained_by_clock(lower)
    if lower < _CLOCK_LOWER or explains < MIN_EXPLAINED:
        return []
    return case.cause("cpu_clock", explains, "cpu_clock_share", usual="cpu_clock_share")


def _check_gpu_clock(case: _SlowRankCase) -> list[Cause]:
    clock = "sm_clock_share" if "sm_clock_share" in case.mine else "sm_clock_mhz"
    lower = _clock_deficit(case, clock)
    explains = case.share_explained_by_clock(lower)
    if not _may_be_device_fault(case) or lower < _CLOCK_LOWER or explains < MIN_EXPLAINED:
        return []
    signals = ("sm_clock_mhz", "sm_clock_share", *THROTTLES, "temperature_c")
    reason = max(THROTTLES, key=case.excess_of)
    if case.excess_of(reason) < 0.05:
        return case.cause("gpu_clock", explains, *signals, usual=clock)
    return case.cause("gpu_throttled", explains, *signals, usual=clock, reason=reason)


def _check_gpu_neighbours(case: _SlowRankCase) -> list[Cause]:
    """Return programs outside the job as a cause, if they use the rank's GPU."""
    more = case.excess_of("gpu_neighbour_share")
    explains = case.share_of_excess(more)
    if not _may_be_device_fault(case) or more < _MIN_NEIGHBOURS or explains < MIN_EXPLAINED:
        return []
    return case.cause("gpu_neighbour", explains, "gpu_neighbour_share")


def _may_be_device_fault(case: _SlowRankCase) -> bool:
    """Return True unless the rank waits for data or for a CPU, which no device can cause."""
    return case.episode.phase not in ("data", "cpu")


# For each signal that counts errors: the kind of the cause.
_ERRORS = {
    "xids_per_s": "gpu_errors", "ecc_errors_per_s": "gpu_errors", "remapped_rows_per_s": "gpu_errors",
    "pcie_replays_per_s": "pcie", "nvlink_errors_per_s": "nvlink", "link_errors_per_s": "network",
}  # fmt: skip
# Smaller rates of these errors are usual. All other errors are reported even if they are rare.
_MIN_ERRORS = {
    "pcie_replays_per_s": 1.0,
    "nvlink_errors_per_s": 1 / 60,
    "link_errors_per_s": 1 / 60,
}


def _check_error_counters(case: _SlowRankCase) -> Iterator[Cause]:
    for signal, kind in _ERRORS.items():
        more = case.excess_of(signal) if _may_be_device_fault(case) else 0.0
        if (
            more > 0
            and more >= _MIN_ERRORS.get(signal, 0.0)
            and case.mine[signal] >= 3 * case.usual.get(signal, 0.0)
        ):
            yield from case.cause(kind, None, signal, reason=signal)


def _check_allocator(case: _SlowRankCase) -> list[Cause]:
    if (
        not _may_be_device_fault(case)
        or case.excess_of("alloc_retries_per_step") < _MIN_RETRIES_PER_STEP
    ):
        return []
    return case.cause("alloc_retries", None, "alloc_retries_per_step")


_RULES: tuple[Callable[[_SlowRankCase], Iterable[Cause]], ...] = (
    _check_garbage_collection, _check_cpu_shortage, _check_disk_and_memory, _check_cpu_clock,
    _check_gpu_clock, _check_gpu_neighbours, _check_error_counters, _check_allocator,
)  # fmt: skip


def _clock_deficit(case: _SlowRankCase, clock: str) -> float:
    """Return how far a clock is below its usual value, as a share of that value."""
    mine, usual = case.mine.get(clock), case.usual.get(clock)
    return 1 - mine / usual if mine is not None and usual else 0.0
