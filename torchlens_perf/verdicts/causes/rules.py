"""Causes of a slow rank, from its signals compared with other ranks' and with its own past. Pure.

A cause that takes time must explain a share of the rank's excess. The explained share is the
additional time of the cause's signal, compared with other ranks, divided by the excess. Link errors
and similar signals take no measurable time. Such signals are reported if only the slow rank has
them. Without a cause, the diagnosis lists the checks, because a guess would mislead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.quantities import format_percent
from torchlens_perf.verdicts.causes.metrics import CLOCKS, METRICS, measured_signals
from torchlens_perf.verdicts.stragglers.findings import Cause, Diagnosis

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.verdicts.stragglers.episodes import Episode

MAX_CAUSES = 3
# A cause is named if it explains at least this share of the excess.
_EXPLAINS = 0.3
# Other programs are named if they keep at least this share of the rank's CPUs, or its GPU, busy.
_MIN_NEIGHBOURS = 0.1
_MIN_FAULTS_PER_S = 20
_MIN_RETRIES_PER_STEP = 0.05
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

    @property
    def gpu_phrase(self) -> str:
        return self.details.get("gpu", "its GPU")

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

    def comparison_clause(self, signal: str, words: Callable[[float], str]) -> str:
        """Return a clause with the other ranks' value of a signal; "" if it is not measured."""
        return (
            f", against {words(self.others[signal])} on the others" if signal in self.others else ""
        )

    def evidence(self, *signals: str) -> dict[str, float]:
        found = {name: self.mine[name] for name in signals if name in self.mine}
        return found | {
            f"others_{name}": self.others[name] for name in signals if name in self.others
        }


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
    found.sort(key=lambda cause: -(_EXPLAINS if cause.explains is None else cause.explains))
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
    if explains < _EXPLAINS:
        return []
    text = (
        f"Python's garbage collector runs in it for {format_percent(case.mine['gc_share'])} of the time"
        f"{case.comparison_clause('gc_share', format_percent)}"
    )
    action = (
        "call gc.freeze() after the model is built and gc.disable() in the loop, with gc.collect()"
        " every so many steps on all ranks at once; look for what makes so many objects there."
    )
    return [Cause("gc", text, action, explains, case.evidence("gc_share"))]


def _check_cpu_shortage(case: _SlowRankCase) -> list[Cause]:
    """Return the reason why the rank lacks CPU time as a cause.

    Recorded waits for a CPU are not part of work. Waits can therefore explain an excess in two
    cases only: in the phase "cpu", and in steps that are too short to record them.
    """
    if case.episode.phase != "cpu" and "asleep_share" in case.mine:
        return []
    waits = case.excess_of("cpu_wait_share")
    explains = case.share_of_excess(waits)
    if explains < _EXPLAINS:
        return []
    waited = (
        f"its thread is runnable but has no CPU for {format_percent(case.mine['cpu_wait_share'])} of the"
        " time"
    )
    # Ranks without a quota have no cpu_quota_share, and other programs are sampled only while a
    # rank waits.
    quota = case.mine.get("cpu_quota_share", 0.0) - case.usual.get("cpu_quota_share", 0.0)
    neighbours = case.mine.get("neighbour_share")
    if quota >= max(0.1, waits / 2):
        used_up = format_percent(case.mine["cpu_quota_share"])
        group = case.details.get("control_group", "")
        text = (
            f"{waited}: its control group {group} uses up its CPU quota in {used_up} of the periods"
        )
        action = (
            "raise the CPU limit of its container or pod (cpu.max), or start fewer threads and"
            " workers in it."
        )
        evidence = case.evidence("cpu_quota_share", "cpu_wait_share")
        return [Cause("cpu_quota", _without_double_spaces(text), action, explains, evidence)]
    evidence = case.evidence("cpu_wait_share", "neighbour_share")
    if neighbours is None:
        action = "see what else runs on its CPUs, how many threads it has, and how it is pinned."
        return [Cause("no_cpu", waited, action, explains, evidence)]
    # This load is not compared with that of other ranks, which may have as much load but wait less.
    if neighbours >= _MIN_NEIGHBOURS:
        who = case.details.get("neighbour")
        text = (
            f"{waited}, while programs other than the job's keep {format_percent(neighbours)} of its CPUs"
            " busy"
        )
        text += f", most of all {who}" if who else ""
        action = "stop or move them; give each rank CPUs of its own (taskset, cpuset, numactl)."
        return [Cause("busy_neighbour", text, action, explains, evidence)]
    text = (
        f"{waited}, and hardly any program but the job's own is busy there: threads, workers and"
        " ranks compete"
    )
    action = (
        "lower OMP_NUM_THREADS and num_workers there, or give it more CPUs: compare its pinning"
        " with other ranks'."
    )
    return [Cause("own_threads", text, action, explains, evidence)]


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
        if reclaims >= _EXPLAINS:
            return [_build_memory_pressure_cause(case, reclaims)]
    if explains < _EXPLAINS or waits < slept / 3:
        return []
    text = (
        f"it waits for a disk for {format_percent(case.mine['disk_wait_share'])} of the time"
        f"{case.comparison_clause('disk_wait_share', format_percent)}"
    )
    action = (
        "compare the storage of that node with the others' (mount, fio, iostat -x); copy the data"
        " to local disks, or read ahead: more workers, larger prefetch_factor."
    )
    signals = ("disk_wait_share", "asleep_share", "major_faults_per_s")
    return [Cause("slow_storage", text, action, explains, case.evidence(*signals))]


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


def _build_memory_pressure_cause(case: _SlowRankCase, explains: float) -> Cause:
    evicts = case.excess_of("refaults_per_s") >= _MIN_FAULTS_PER_S
    where = (
        f"its control group {case.details.get('control_group', '')} has to evict pages that it"
        " needs again"
    )
    full = case.mine.get("memory_limit_share", 0.0)
    text = (
        f"{where if evicts else 'memory is short on its node'}: it waits for "
        f"{case.mine['major_faults_per_s']:.0f} pages a second"
        f"{case.comparison_clause('major_faults_per_s', '{:.0f}'.format)}"
    )
    if full >= 0.9:
        text += f"; {format_percent(full)} of the group's memory limit is in use"
    action = (
        "raise the memory limit there, or hold less: fewer workers, smaller prefetch and caches;"
        " see what else takes memory on that node."
    )
    return Cause(
        "memory_pressure",
        _without_double_spaces(text),
        action,
        explains,
        case.evidence(*_MEMORY_SIGNALS),
    )


def _check_cpu_clock(case: _SlowRankCase) -> list[Cause]:
    lower = _clock_deficit(case, "cpu_clock_share")
    explains = case.share_explained_by_clock(lower)
    if lower < _CLOCK_LOWER or explains < _EXPLAINS:
        return []
    text = (
        f"its CPU runs at {format_percent(case.mine['cpu_clock_share'])} of its highest clock, against "
        f"{format_percent(case.usual['cpu_clock_share'])} usually"
    )
    action = (
        "look at the governor (cpupower frequency-info), power limits and temperature of that node."
    )
    return [Cause("cpu_clock", text, action, explains, case.evidence("cpu_clock_share"))]


def _check_gpu_clock(case: _SlowRankCase) -> list[Cause]:
    lower = (
        _clock_deficit(case, "sm_clock_share")
        if "sm_clock_share" in case.mine
        else _clock_deficit(case, "sm_clock_mhz")
    )
    explains = case.share_explained_by_clock(lower)
    if not _may_be_device_fault(case) or lower < _CLOCK_LOWER or explains < _EXPLAINS:
        return []
    reasons = {
        "thermal_share": (
            "temperature",
            "look at the cooling of that GPU: fans, airflow, inlet temperature",
        ),
        "hw_slowdown_share": (
            "the board's slowdown",
            "look at its power supply and cooling: power brake, cables",
        ),
        "power_share": (
            "its power limit",
            "compare its power limit with the others' (nvidia-smi -q -d POWER)",
        ),
    }
    reason = max(reasons, key=case.excess_of)
    clock = (
        f"{case.gpu_phrase}'s SM clock is {case.mine['sm_clock_mhz'] / 1e3:.2f} GHz, {format_percent(lower)}"
        " below the usual"
    )
    evidence = case.evidence("sm_clock_mhz", "sm_clock_share", *reasons, "temperature_c")
    if case.excess_of(reason) < 0.05:
        action = (
            "compare its clock settings with the others' (nvidia-smi -q -d CLOCK): locked or"
            " application clocks."
        )
        return [Cause("gpu_clock", clock, action, explains, evidence)]
    why, action = reasons[reason]
    degrees = case.mine.get("temperature_c")
    hot = f" at {degrees:.0f} C" if reason == "thermal_share" and degrees is not None else ""
    text = f"{clock}; it was throttled for {format_percent(case.mine[reason])} of the time, for {why}{hot}"
    return [
        Cause(
            "gpu_throttled",
            text,
            f"{action}; drain the node if this continues.",
            explains,
            evidence,
        )
    ]


def _check_gpu_neighbours(case: _SlowRankCase) -> list[Cause]:
    """Return programs outside the job as a cause, if they use the rank's GPU."""
    more = case.excess_of("gpu_neighbour_share")
    explains = case.share_of_excess(more)
    if not _may_be_device_fault(case) or more < _MIN_NEIGHBOURS or explains < _EXPLAINS:
        return []
    text = (
        f"programs outside the job use {case.gpu_phrase} for"
        f" {format_percent(case.mine['gpu_neighbour_share'])} of the time"
        f"{case.comparison_clause('gpu_neighbour_share', format_percent)}"
    )
    action = "see what runs there (nvidia-smi pmon), and stop it."
    return [Cause("gpu_neighbour", text, action, explains, case.evidence("gpu_neighbour_share"))]


def _may_be_device_fault(case: _SlowRankCase) -> bool:
    """Return True unless the rank waits for data or for a CPU, which no device can cause."""
    return case.episode.phase not in ("data", "cpu")


# For each signal that counts errors: the kind of the cause, the name of the errors, and the action.
_ERRORS = {
    "xids_per_s": (
        "gpu_errors",
        "errors of the driver (XID)",
        "look them up in the kernel's log; drain the node",
    ),
    "ecc_errors_per_s": (
        "gpu_errors",
        "uncorrectable ECC errors",
        "reset or replace that GPU; drain the node",
    ),
    "remapped_rows_per_s": (
        "gpu_errors",
        "memory rows that were remapped, or are waiting for it",
        "reset that GPU at the next opportunity",
    ),
    "pcie_replays_per_s": (
        "pcie",
        "PCIe replays",
        "look at the slot, riser and link width (nvidia-smi -q -d PCIE)",
    ),
    "nvlink_errors_per_s": (
        "nvlink",
        "NVLink errors",
        "look at nvidia-smi nvlink -e, and at the fabric manager",
    ),
    "link_errors_per_s": (
        "network",
        "InfiniBand errors",
        "look at the cable and port (perfquery, ibdiagnet)",
    ),
}
# Smaller rates of these errors are usual. All other errors are reported even if they are rare.
_MIN_ERRORS = {
    "pcie_replays_per_s": 1.0,
    "nvlink_errors_per_s": 1 / 60,
    "link_errors_per_s": 1 / 60,
}


def _check_error_counters(case: _SlowRankCase) -> list[Cause]:
    found = []
    for signal, (kind, what, action) in _ERRORS.items():
        more = case.excess_of(signal) if _may_be_device_fault(case) else 0.0
        if (
            more <= 0
            or more < _MIN_ERRORS.get(signal, 0.0)
            or case.mine[signal] < 3 * case.usual.get(signal, 0.0)
        ):
            continue
        text = f"{case.gpu_phrase if kind != 'network' else 'its node'} has {what}"
        # A pending remapping is counted in every sample until a reset, so its rate is meaningless.
        if signal != "remapped_rows_per_s":
            text += (
                f": {_format_rate(case.mine[signal])}{case.comparison_clause(signal, _format_rate)}"
            )
        found.append(Cause(kind, text, f"{action}.", None, case.evidence(signal)))
    return found


def _check_allocator(case: _SlowRankCase) -> list[Cause]:
    if (
        not _may_be_device_fault(case)
        or case.excess_of("alloc_retries_per_step") < _MIN_RETRIES_PER_STEP
    ):
        return []
    every = 1 / case.mine["alloc_retries_per_step"]
    often = "in every step" if every < 1.5 else f"once in {every:.0f} steps"
    text = (
        f"its device allocator runs out of memory {often}: each time it waits for the device and"
        " frees its cache"
    )
    action = (
        "set PYTORCH_ALLOC_CONF=expandable_segments:True, or leave it more free memory (smaller"
        " batch)."
    )
    return [Cause("alloc_retries", text, action, None, case.evidence("alloc_retries_per_step"))]


_RULES: tuple[Callable[[_SlowRankCase], list[Cause]], ...] = (
    _check_garbage_collection, _check_cpu_shortage, _check_disk_and_memory, _check_cpu_clock,
    _check_gpu_clock, _check_gpu_neighbours, _check_error_counters, _check_allocator,
)  # fmt: skip


def _clock_deficit(case: _SlowRankCase, clock: str) -> float:
    """Return how far a clock is below its usual value, as a share of that value."""
    mine, usual = case.mine.get(clock), case.usual.get(clock)
    return 1 - mine / usual if mine is not None and usual else 0.0


def _format_rate(per_s: float) -> str:
    for unit, seconds in (("second", 1), ("minute", 60), ("hour", 3600)):
        if per_s * seconds >= 1:
            return f"{per_s * seconds:.0f} {'an' if unit == 'hour' else 'a'} {unit}"
    return f"{per_s * 86400:.1f} a day" if per_s else "none"


def _without_double_spaces(text: str) -> str:
    """Remove double spaces, which remain where a name is not known."""
    return " ".join(text.split())
