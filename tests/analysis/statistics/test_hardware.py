"""Statistics of GPU and port samples over a period."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.saved import save_and_load
from tests.support.telemetry import port_sample
from torchlens_perf.analysis.statistics.hardware import GpuTotals, LinkTotals, compute_signals
from torchlens_perf.run.hardware_samples import (
    COUNTERS,
    GPUS,
    Sample,
    build_sample,
    counter_increases,
)

SECOND = 1_000_000_000


def gpu(count: int, **fields: Any) -> list[Sample]:
    """Return samples of a GPU at intervals of a second.

    A counter is given as its increase per second. A gauge may be a list.
    """
    made: list[Sample] = []
    for index in range(count):
        values = {
            name: (
                value * index
                if name in COUNTERS[GPUS]
                else value[index]
                if isinstance(value, list)
                else value
            )
            for name, value in fields.items()
        }
        before = made[-1] if made else None
        made.append(build_sample(GPUS, "GPU-1", index * SECOND, index, values, before))
    return made


def test_unmeasured_gpu_values_are_missing_and_not_zero() -> None:
    """The GPU in this test reports nothing."""
    assert compute_signals(GpuTotals(), []) == {}
    assert compute_signals(GpuTotals(), gpu(5)) == {}
    assert compute_signals(LinkTotals(), []) == {}


def test_clocks_temperature_and_memory_are_means_over_time() -> None:
    """The clock is also divided by the GPU's highest clock."""
    samples = gpu(
        4, sm_clock_hz=[1000, 1500, 1500, 2000], sm_clock_max_hz=2000, temperature_c=[60, 70, 80, 90], power_w=500.0,
        memory_used_bytes=30, memory_total_bytes=40,
    )  # fmt: skip
    found = compute_signals(GpuTotals(), samples)
    assert found == {
        "sm_clock_hz": 1500, "sm_clock_share": 0.75, "temperature_c": 75, "power_w": 500, "memory_used_share": 0.75,
    }  # fmt: skip


def test_throttled_fractions_are_computed_from_the_drivers_counters() -> None:
    """Counters are exact, unlike samples."""
    samples = gpu(
        11, throttle_power_ns=SECOND // 4, throttle_thermal_ns=SECOND // 10, throttle_hw_thermal_ns=SECOND // 5,
        throttle_hw_power_brake_ns=0, clock_reasons=0,
    )  # fmt: skip
    found = compute_signals(GpuTotals(), samples)
    assert (
        found["power_share"],
        found["thermal_share"],
        found["hw_slowdown_share"],
    ) == pytest.approx((0.25, 0.2, 0.2))


def test_throttled_fractions_without_counters_are_computed_from_samples() -> None:
    found = compute_signals(GpuTotals(), gpu(4, clock_reasons=[0x4, 0x4, 0x60, 0x1]))
    assert found == {"power_share": 0.5, "thermal_share": 0.25, "hw_slowdown_share": 0.25}


def test_gpu_errors_are_increases_within_the_period() -> None:
    """A memory row that waits for a reset to be remapped counts as one error."""
    samples = gpu(
        5, ecc_uncorrected=1, xids=0, pcie_replays=3, nvlink_errors=1, nvlink_replays=2, remapped_rows=0,
        remapping_pending=True,
    )  # fmt: skip
    found = compute_signals(GpuTotals(), samples[2:])
    assert found == {
        "ecc_uncorrected": 3, "xid_count": 0, "pcie_replays": 9, "nvlink_errors": 9, "remapped_rows": 1,
    }  # fmt: skip


def test_counter_of_a_reset_gpu_counts_from_zero() -> None:
    """The increase is the counter's current value. An unknown counter has no increase."""
    assert counter_increases({"a": 10, "b": 5}, {"a": 12, "b": 2, "c": 4, "d": 1}, "abcd") == {
        "a": 2,
        "b": 2,
    }


def test_hardware_totals_continue_after_a_json_round_trip() -> None:
    """A restarted sidecar continues with the sums of the earlier one."""
    samples = gpu(
        6,
        sm_clock_hz=[1, 2, 3, 4, 5, 6],
        sm_clock_max_hz=6,
        energy_j=500.0,
        clock_reasons=4,
        last_xid=13,
        xids=1,
    )
    whole, first = GpuTotals(), GpuTotals()
    for sample in samples:
        whole.add_sample(sample)
    for sample in samples[:3]:
        first.add_sample(sample)
    second = save_and_load(first)
    for sample in samples[3:]:
        second.add_sample(sample)

    assert second == whole
    assert (
        second.grown["energy_j"],
        second.last["last_xid"],
        second.to_signals()["xid_count"],
    ) == (
        2500,
        13,
        5,
    )


def test_port_signals_are_counter_increases_sum_of_errors_used_rate_and_time_without_link() -> None:
    """Bytes are counter increases, and the increases of all error counters are added up."""
    first = port_sample("mlx5_0", 1, active=True, rate_bits=400_000_000_000)
    grown = {
        "transmitted_bytes": 25_000_000_000,
        "received_bytes": 0,
        "symbol_errors": 2,
        "ack_timeouts": 3,
    }
    second = port_sample(
        "mlx5_0", 1, active=False, rate_bits=400_000_000_000, interval_ns=2 * SECOND, grown=grown
    )
    assert compute_signals(LinkTotals(), [first, second]) == {
        **grown, "errors": 5, "transmitted_share": pytest.approx(0.25), "received_share": 0, "inactive_share": 0.5,
    }  # fmt: skip
    assert compute_signals(LinkTotals(), [first]) == {"inactive_share": 0}
