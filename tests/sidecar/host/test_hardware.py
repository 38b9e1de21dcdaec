"""Tests that telemetry samples become signals and that a verdict names them as the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.telemetry.test_infiniband import port
from tests.sidecar.telemetry.test_log import FIRST, SECOND, SECOND_GPU, Rig
from tests.support.ranks import HOST, Rank
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.rank_metrics import HardwareSignals, RankMetrics
from torchlens_perf.verdicts.causes.metrics import METRICS

HEALTHY: dict[str, Any] = {
    "sm_clock_hz": 1_980_000_000, "sm_clock_max_hz": 1_980_000_000, "clock_reasons": 0,
    "temperature_c": 60, "throttle_thermal_ns": 0, "throttle_power_ns": 0,
    "throttle_hw_power_brake_ns": 0, "ecc_uncorrected": 3, "remapped_rows": 0, "xids": 0, "pcie_replays": 7,
    "nvlink_errors": 0,
}  # fmt: skip


@pytest.fixture
def rig(run: RunDirectory, tmp_path: Path) -> Rig:
    return Rig(run, tmp_path / "infiniband")


def test_signals_are_made_once_per_hardware_sample(rig: Rig) -> None:
    """Signals of levels are means, and signals of counters are rates since the previous call.

    Without a new sample, there are no signals.
    """
    signals = HardwareSignals(rig.log)
    rig.gpus.values = {FIRST: HEALTHY}
    rig.seconds(1, FIRST)
    first = signals.take_gpu_signals(FIRST, rig.now_ns)
    assert signals.take_gpu_signals(FIRST, rig.now_ns) == {}
    rig.gpus.values = {
        FIRST: {
            **HEALTHY, "sm_clock_hz": 1_200_000_000, "throttle_thermal_ns": SECOND // 2, "xids": 1, "pcie_replays": 17,
            "ecc_uncorrected": 4, "nvlink_errors": 2, "others_busy": 0.25,
        }
    }  # fmt: skip
    rig.seconds(1, FIRST)
    second = signals.take_gpu_signals(FIRST, rig.now_ns)

    assert not {name for name in first if "_per_" in name}  # A rate is computed from two samples.
    assert first["sm_clock_mhz"] == 1980
    assert second["sm_clock_mhz"] == 1200
    assert second["thermal_share"] == 0.5
    assert second["gpu_neighbour_share"] == 0.25
    assert "gpu_neighbour_share" not in first  # The driver did not report processes.
    assert (second["xids_per_s"], second["pcie_replays_per_s"], second["ecc_errors_per_s"]) == (
        1,
        10,
        1,
    )
    assert second["nvlink_errors_per_s"] == 2
    assert signals.take_gpu_signals("GPU-unknown", rig.now_ns) == {}
    assert set(second) <= set(METRICS)


def test_low_clock_of_an_idle_gpu_is_not_a_signal(rig: Rig) -> None:
    signals = HardwareSignals(rig.log)
    rig.gpus.values = {FIRST: {**HEALTHY, "sm_clock_hz": 345_000_000, "clock_reasons": 1}}
    rig.seconds(1, FIRST)
    idle = signals.take_gpu_signals(FIRST, rig.now_ns)

    assert not {"sm_clock_mhz", "sm_clock_share"} & idle.keys()
    assert idle["temperature_c"] == 60


def test_missing_gpu_values_produce_no_signals(rig: Rig) -> None:
    rig.gpus.values = {FIRST: {"temperature_c": 50}}
    signals = HardwareSignals(rig.log)
    rig.seconds(2, FIRST)

    assert signals.take_gpu_signals(FIRST, rig.now_ns) == {"temperature_c": 50}


def test_port_errors_of_a_node_are_summed_to_one_signal(rig: Rig, tmp_path: Path) -> None:
    """A rate is known from the second sample on."""
    signals = HardwareSignals(rig.log)
    ports = [port(tmp_path / "infiniband", name) for name in ("mlx5_0", "mlx5_1")]
    rig.seconds(5)
    assert signals.take_node_signals(rig.now_ns) == {}
    for folder in ports:
        (folder / "counters/symbol_error").write_text("10\n")
    rig.seconds(5)
    signals_found = signals.take_node_signals(rig.now_ns)

    # The counters of two ports grow from 1 to 10 in five seconds.
    assert signals_found == {"link_errors_per_s": pytest.approx(3.6)}
    assert signals.take_node_signals(rig.now_ns) == {}


def test_verdict_names_gpu_throttling_as_the_cause(run: RunDirectory, rig: Rig) -> None:
    """One of two GPUs is throttled from step 300 on."""
    sidecar = Sidecar(run, HOST, None, lambda run, settings: None)
    sidecar.telemetry = rig.log
    sidecar.monitor.metrics = RankMetrics(rig.log)
    ranks = [Rank(run, rank) for rank in range(2)]
    for index, (rank, uuid) in enumerate(zip(ranks, (FIRST, SECOND_GPU), strict=True)):
        rank.session.facts.gpus = [{"uuid": uuid, "name": "NVIDIA H200", "index": index}]
        rank.session.publish()
        rank.session.publish()
    rig.gpus.values = {FIRST: HEALTHY, SECOND_GPU: HEALTHY}
    for second in range(40):
        throttled = second >= 15
        if throttled:
            rig.gpus.values[SECOND_GPU] = {
                **HEALTHY, "sm_clock_hz": 1_200_000_000, "temperature_c": 91,
                "throttle_thermal_ns": (second - 14) * SECOND * 8 // 10,
            }  # fmt: skip
        own_ms = 33 if throttled else 20
        ranks[0].steps(20, forward=10, backward=10, communication=own_ms - 20 + 1)
        ranks[1].steps(20, forward=own_ms / 2, backward=own_ms / 2, communication=1)
        sidecar.read_rings()
        sidecar.count_records()
        sidecar.sample_telemetry()
        sidecar.judge_ranks(rig.now_ns / 1e9)
        rig.now_ns += SECOND
    for rank in ranks:
        rank.close()
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.judge_ranks(rig.now_ns / 1e9, final=True)
    sidecar.save_records()
    verdict = build_report(run.run_id, [sidecar.state])["verdicts"][0]
    sidecar.close()

    assert (verdict.kind, verdict.rank) == ("straggler", 1)
    (cause,) = verdict.diagnosis.causes
    assert cause.kind == "gpu_throttled"
    assert cause.explains == pytest.approx(1.0, abs=0.1)
    assert "Cause: GPU 00000000:1B:00.0 (NVIDIA H200)'s SM clock is 1.2" in verdict.sentence
    assert (
        "below the usual; it was throttled for 77% of the time, for temperature at 9"
        in verdict.sentence
    )
    assert "Next: look at the cooling of that GPU" in verdict.sentence
    assert verdict.where == {"host.name": HOST}
