"""Sentences on the causes of a slow rank, and the action against each. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from torchlens_perf.analysis.statistics.quantities import format_percent
from torchlens_perf.verdicts.stragglers.findings import Cause, Diagnosis


def describe_diagnosis(diagnosis: Diagnosis | None, rank: int | None) -> str:
    """Return sentences on the causes, the most likely first, or the checks that found none.

    Return "" without a diagnosis, and if nothing could be checked. The first sentence follows
    "Cause:".
    """
    if diagnosis is None or not (diagnosis.causes or diagnosis.looked_at):
        return ""
    found = [(each.explains, describe_cause(each, rank)) for each in diagnosis.causes]
    explaining = [
        f"{text}, which explains {format_percent(min(1.0, explains))} of the difference"
        for explains, (text, _) in found
        if explains is not None
    ]
    checked = f"none found (checked: {', '.join(diagnosis.looked_at)})"
    none = "none found that takes this time" if found else checked
    others = (
        f"Not seen on other ranks: {text}; {action}"
        for explains, (text, action) in found
        if explains is None
    )
    return " ".join((f"{'; '.join(explaining) or none}.", *others))


def describe_cause(cause: Cause, rank: int | None) -> tuple[str, str]:
    """Return the observation on a slow rank as a clause, and the action."""
    text, action = _WORDS[cause.about.get("reason", cause.kind)]
    return text.format_map(_format_values(cause) | {"rank": f"rank {rank}"}), action


def _format_values(cause: Cause) -> defaultdict[str, str]:
    """Return the values that texts name. A value that is not known is ""."""
    signals, names = cause.evidence, cause.about
    found = defaultdict[str, str](str)
    for name, value in signals.items():
        found[name] = _format_signal(name, value)
        if f"others_{name}" in signals:
            others = _format_signal(name, signals[f"others_{name}"])
            found[f"than_{name}"] = f", against {others} on the others"
        if f"usual_{name}" in signals:
            found["lower"] = format_percent(1 - value / signals[f"usual_{name}"])
    found["gpu"] = names.get("gpu", "the GPU of the rank")
    found["control_group"] = f"the control group {names.get('control_group', '')}".rstrip()
    if names.get("neighbour"):
        found["most"] = f", most of all {names['neighbour']}"
    if signals.get("memory_limit_share", 0.0) >= _FULL:
        found["used"] = f"; {found['memory_limit_share']} of the group's memory limit is in use"
    if "temperature_c" in signals:
        found["hot"] = f" at {signals['temperature_c']:.0f} C"
    return found


def _format_signal(name: str, value: float) -> str:
    for ending, form in _FORMS.items():
        if name.endswith(ending):
            return form(value)
    if name.endswith("_per_step"):
        rarely = f"once in {1 / value:.0f} steps" if value else "never"
        return "in every step" if 1.5 * value > 1 else rarely
    return _format_rate(value)


_FORMS: Mapping[str, Callable[[float], str]] = {
    "_share": format_percent,
    "_mhz": lambda mhz: f"{mhz / 1e3:.2f} GHz",
    "faults_per_s": "{:.0f}".format,
    "tokens": "{:,.0f}".format,
    "_times": "{:.2f} times".format,
}
"""How a signal is written, by the end of its name."""


def _format_rate(per_s: float) -> str:
    for unit, seconds in (("second", 1), ("minute", 60), ("hour", 3600)):
        if per_s * seconds >= 1:
            return f"{per_s * seconds:.0f} {'an' if unit == 'hour' else 'a'} {unit}"
    return f"{per_s * 86400:.1f} a day" if per_s else "none"


_FULL = 0.9
_NO_CPU = "the main thread of {rank} is runnable but has no CPU for {cpu_wait_share} of the time"
_SHORT_OF_MEMORY = (
    "{rank} waits for {major_faults_per_s} pages a second{than_major_faults_per_s}{used}",
    "raise the memory limit there, or hold less: fewer workers, smaller prefetch and caches; see"
    " what else takes memory on that node.",
)
_GPU_CLOCK = "{gpu}'s SM clock is {sm_clock_mhz}, {lower} below the usual"
_TOKENS = (
    "its tokens: its experts get {tokens} tokens at a time, {of_mean_times} the mean of"
    " {mean_tokens}"
)
_BALANCE = (
    "balance the experts: a stronger balancing loss or bias of the router, busy experts on other ranks"
    " or copied to them."
)
_WORDS = {
    "tokens": (_TOKENS, _BALANCE),
    "tokens_untimed": (f"{_TOKENS}, if all of its computation grows with them", _BALANCE),
    "machine": (
        "its machine: its experts get {of_mean_times} the mean of tokens, yet it computes"
        " {longer_share} longer",
        "compare the clock speed, temperature and other processes of its machine with the other"
        " ranks'.",
    ),
    "gc": (
        "Python's garbage collector takes {gc_share} of the step time of {rank}{than_gc_share}",
        "call gc.freeze() after the model is built and gc.disable() in the loop, with gc.collect()"
        " every so many steps on all ranks at once; look for what makes so many objects there.",
    ),
    "cpu_quota": (
        f"{_NO_CPU}: {{control_group}} uses up its CPU quota in {{cpu_quota_share}} of the periods",
        "raise the CPU limit of its container or pod (cpu.max), or start fewer threads and workers"
        " in it.",
    ),
    "no_cpu": (
        _NO_CPU,
        "see what else runs on its CPUs, how many threads it has, and how it is pinned.",
    ),
    "busy_neighbour": (
        f"{_NO_CPU}, while programs other than the job's keep {{neighbour_share}} of its CPUs"
        " busy{most}",
        "stop or move them; give each rank CPUs of its own (taskset, cpuset, numactl).",
    ),
    "own_threads": (
        f"{_NO_CPU}, and hardly any program but the job's own is busy there: threads, workers and"
        " ranks compete",
        "lower OMP_NUM_THREADS and num_workers there, or give it more CPUs: compare its pinning"
        " with other ranks'.",
    ),
    "slow_storage": (
        "{rank} waits for a disk for {disk_wait_share} of the time{than_disk_wait_share}",
        "compare the storage of that node with the others' (mount, fio, iostat -x); copy the data"
        " to local disks, or read ahead: more workers, larger prefetch_factor.",
    ),
    "memory_pressure": (
        f"memory is short on the node: {_SHORT_OF_MEMORY[0]}",
        _SHORT_OF_MEMORY[1],
    ),
    "evicted_pages": (
        f"{{control_group}} has to evict pages that it needs again: {_SHORT_OF_MEMORY[0]}",
        _SHORT_OF_MEMORY[1],
    ),
    "cpu_clock": (
        "the CPU of {rank} runs at {cpu_clock_share} of its highest clock, against {usual_cpu_clock_share}"
        " usually",
        "look at the governor (cpupower frequency-info), power limits and temperature of that"
        " node.",
    ),
    "gpu_clock": (
        _GPU_CLOCK,
        "compare its clock settings with the others' (nvidia-smi -q -d CLOCK): locked or"
        " application clocks.",
    ),
    "thermal_share": (
        f"{_GPU_CLOCK}; it was throttled for {{thermal_share}} of the time, for temperature{{hot}}",
        "look at the cooling of that GPU: fans, airflow, inlet temperature; drain the node if this"
        " continues.",
    ),
    "hw_slowdown_share": (
        f"{_GPU_CLOCK}; it was throttled for {{hw_slowdown_share}} of the time, for the board's"
        " slowdown",
        "look at its power supply and cooling: power brake, cables; drain the node if this"
        " continues.",
    ),
    "power_share": (
        f"{_GPU_CLOCK}; it was throttled for {{power_share}} of the time, for its power limit",
        "compare its power limit with the others' (nvidia-smi -q -d POWER); drain the node if this"
        " continues.",
    ),
    "gpu_neighbour": (
        "programs outside the job use {gpu} for {gpu_neighbour_share} of the"
        " time{than_gpu_neighbour_share}",
        "see what runs there (nvidia-smi pmon), and stop it.",
    ),
    "xids_per_s": (
        "{gpu} has errors of the driver (XID): {xids_per_s}{than_xids_per_s}",
        "look them up in the kernel's log; drain the node.",
    ),
    "ecc_errors_per_s": (
        "{gpu} has uncorrectable ECC errors: {ecc_errors_per_s}{than_ecc_errors_per_s}",
        "reset or replace that GPU; drain the node.",
    ),
    # A pending remapping is counted in every sample until a reset, so its rate is meaningless.
    "remapped_rows_per_s": (
        "{gpu} has memory rows that were remapped, or are waiting for it",
        "reset that GPU at the next opportunity.",
    ),
    "pcie_replays_per_s": (
        "{gpu} has PCIe replays: {pcie_replays_per_s}{than_pcie_replays_per_s}",
        "look at the slot, riser and link width (nvidia-smi -q -d PCIE).",
    ),
    "nvlink_errors_per_s": (
        "{gpu} has NVLink errors: {nvlink_errors_per_s}{than_nvlink_errors_per_s}",
        "look at nvidia-smi nvlink -e, and at the fabric manager.",
    ),
    "link_errors_per_s": (
        "the node of {rank} has InfiniBand errors: {link_errors_per_s}{than_link_errors_per_s}",
        "look at the cable and port (perfquery, ibdiagnet).",
    ),
    "alloc_retries": (
        "the device allocator of {rank} runs out of memory {alloc_retries_per_step}: each time it waits for"
        " the device and frees its cache",
        "set PYTORCH_ALLOC_CONF=expandable_segments:True, or leave it more free memory (smaller"
        " batch).",
    ),
}
"""The observation and the action of each cause, by its reason or else its kind."""
