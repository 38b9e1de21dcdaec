"""Telemetry of a real GPU: its values, the time of a sample, and the units of its quantities."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.gpu_check.lines import Checks
from torchlens_perf.analysis.statistics.hardware import GpuTotals
from torchlens_perf.hooks.device_hooks import read_gpu_identity
from torchlens_perf.run.hardware_samples import COUNTERS, GPU_GAUGES, GPUS, Sample
from torchlens_perf.sidecar.telemetry.gpu import GpuTelemetry

_PERIOD_S, _IDLE, _LOADED = 0.5, 8, 16  # samples


def nvml(checks: Checks) -> None:
    """Sample a GPU while it is idle, and then while it computes matrix products."""
    uuid = str(read_gpu_identity(0)["uuid"])
    telemetry = GpuTelemetry()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    # Open the library and start GPM's first interval.
    _samples(telemetry, uuid, 2, [])
    took_ms: list[float] = []
    idle = _samples(telemetry, uuid, _IDLE, took_ms)
    stop_s = time.monotonic() + _PERIOD_S * (_LOADED + 2)
    loaded = []
    while time.monotonic() < stop_s:
        for _ in range(50):
            matrix @ matrix
        torch.cuda.synchronize()
        if not loaded or time.monotonic_ns() - loaded[-1].monotonic_ns >= _PERIOD_S * 1e9:
            loaded += _samples(telemetry, uuid, 1, took_ms, period_s=0)
    notes = list(telemetry.notes)
    telemetry.close()

    found = bool(idle) and idle[-1]["temperature_c"] is not None
    checks.bar(
        "nvml", "the UUID that torch tells, with our prefix, is NVML's", uuid, "found", found
    )
    if not found:
        checks.missing("nvml", "everything else", "; ".join(notes) or "no temperature")
        return
    _supported(checks, loaded[-1], notes)
    checks.bar(
        "nvml", "wall time of a sample, median", f"{statistics.median(took_ms):.2f} ms",
        "1 ms", statistics.median(took_ms) <= 1.0,
    )  # fmt: skip
    checks.value("nvml", "wall time of a sample, longest", f"{max(took_ms):.2f} ms")
    _load_shows(checks, idle, loaded[2:])


def _samples(
    telemetry: GpuTelemetry,
    uuid: str,
    count: int,
    took_ms: list[float],
    period_s: float = _PERIOD_S,
) -> list[Sample]:
    made = []
    for _ in range(count):
        time.sleep(period_s)
        begun_ns = time.monotonic_ns()
        made += telemetry.sample_gpus([uuid], begun_ns, time.time_ns()).values()
        took_ms.append((time.monotonic_ns() - begun_ns) / 1e6)
    return made


def _supported(checks: Checks, sample: Sample, notes: Sequence[str]) -> None:
    names = (*GPU_GAUGES, *COUNTERS[GPUS])
    absent = [name for name in names if sample[name] is None]
    checks.value(
        "nvml", "quantities that this GPU tells", f"{len(names) - len(absent)} of {len(names)}"
    )
    checks.value("nvml", "those that it does not", ", ".join(absent) or "none")
    checks.value("nvml", "notes", "; ".join(notes) or "none")


def _load_shows(checks: Checks, idle: Sequence[Sample], loaded: Sequence[Sample]) -> None:
    before, under = GpuTotals(), GpuTotals()
    for totals, samples in ((before, idle), (under, loaded)):
        for sample in samples:
            totals.add_sample(sample)
    for name, unit in (("power_w", "W"), ("busy", ""), ("sm_active", ""), ("tensor_active", "")):
        low, high = before.mean(name), under.mean(name)
        if low is None or high is None:
            checks.missing("nvml", f"{name}, idle and under load", "this GPU does not tell")
        else:
            checks.bar(
                "nvml",
                f"{name}, idle and under load",
                f"{low:.2f} {unit}, {high:.2f} {unit}",
                "more",
                high > 1.05 * low,
            )
    power_w, energy_j, over_ns = (
        under.mean("power_w"),
        under.grown.get("energy_j"),
        under.grown_ns.get("energy_j"),
    )
    if power_w and energy_j is not None and over_ns:
        ratio = energy_j / (over_ns / 1e9) / power_w
        checks.bar(
            "nvml",
            "mean power by energy, to that by power",
            f"{ratio:.2f}",
            "0.8 to 1.25",
            0.8 <= ratio <= 1.25,
        )
    shares = {
        name: under.grown[name] / ns
        for name, ns in under.grown_ns.items()
        if name.startswith("throttle")
    }
    most = max(shares.values(), default=0.0)
    checks.bar(
        "nvml",
        "longest throttled time of all reasons, to the time",
        f"{most:.3f}",
        "at most 1.05",
        most <= 1.05,
    )
    # Compare sampled throttle reasons with the counter of throttled time: a wrong unit would differ
    # by a factor of 1000.
    asked, counted = under.counts.get("clock_reasons", 0), under.throttled_shares().get("power")
    by_samples = under.reasons.get("power", 0) / asked if asked else 0.0
    if by_samples < 0.5 or counted is None:
        checks.missing(
            "nvml",
            "the unit of throttled times",
            f"power held clocks down in {by_samples:.0%} of samples",
        )
    else:
        value = f"{counted:.3f}, {by_samples:.3f}"
        checks.bar(
            "nvml",
            "held down by power, by counter and by samples",
            value,
            "alike",
            counted > 0.1 * by_samples,
        )
    checks.value(
        "nvml",
        "throttled under load",
        ", ".join(f"{k} {v:.3f}" for k, v in under.throttled_shares().items()) or "-",
    )
    checks.value(
        "nvml",
        "clock under load, to its highest",
        f"{under.to_signals().get('sm_clock_share', float('nan')):.3f}",
    )
