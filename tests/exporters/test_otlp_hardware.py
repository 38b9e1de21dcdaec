"""Hardware metrics from a scripted NVML, in a real receiver, the files and the report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.device.fake_nvml import HOPPER, UUIDS, FakeNvml, compile_nvml
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER
from tests.support.otlp_receiver import ReceivedPoint, Receiver
from tests.support.ranks import HOST, Rank
from tests.support.recorded_run import environment
from tests.support.servers import wait_for
from tests.support.telemetry import gpu_sample, port_sample, read_samples
from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.otlp_hardware import HardwareMetrics
from torchlens_perf.exporters.series import ArrayMeter
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.hardware_samples import GPUS, HardwareSamples
from torchlens_perf.verdicts import node_state

FIRST, SECOND = UUIDS[:2]


def values(
    points: list[ReceivedPoint], metric: str, gpu: str, attributes: dict[str, str]
) -> list[float]:
    """Return the points of a series in order of arrival."""
    wanted = {semantics.HARDWARE_ID: gpu, **attributes}.items()
    return [
        point.value
        for point in points
        if point.metric == metric and wanted <= point.attributes.items()
    ]


@pytest.mark.distributed
@pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER)
def test_gpu_shared_by_two_ranks_is_reported_once(
    run: RunDirectory, receiver: Receiver, tmp_path: Path
) -> None:
    """The backend, the files and the report have the GPU once."""
    compile_nvml(tmp_path / "libnvidia-ml.so.1")
    nvml = FakeNvml(tmp_path / "gpus.txt")
    nvml.gpus = [{**HOPPER}, {**HOPPER, "sm_mhz": 990, "temperature": 88, "busy": 98}, {**HOPPER}]
    nvml.write()
    ranks = [Rank(run, rank, 3) for rank in range(3)]
    for rank, uuid in zip(ranks, (FIRST, FIRST, SECOND), strict=True):
        rank.session.facts.gpus = [{"uuid": uuid, "name": "NVIDIA H200", "index": 0}]
        rank.session.publish()
        rank.session.publish()
        rank.steps(5, forward=4)
    told = {
        "LD_LIBRARY_PATH": str(tmp_path), "FAKE_NVML": str(nvml.script), "CUDA_VISIBLE_DEVICES": "",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint("http/protobuf"), "OTEL_TRACES_EXPORTER": "none",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
    }  # fmt: skip
    command = [sys.executable, "-m", "torchlens_perf", "sidecar", str(run.path), "--host", HOST]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment(tmp_path, told), stderr=log)

    def newest(metric: str, attribute: str, told: str) -> float | None:
        found = values(receiver.points(), metric, SECOND, {attribute: told})
        return found[-1] if found else None

    try:
        assert (
            wait_for(lambda: newest("hw.gpu.clock.frequency", semantics.GPU_CLOCK_OF, "sm"), 20)
            == 990e6
        )
        nvml.gpus[1].update({"field 83": 5_000_900_000, "field 270": 400_000_000, "field 94": 3})
        nvml.write("gpu 1 xid 79")
        # The library may reread its script in the middle of a sample, so only the next sample is
        # complete. On a busy machine a sample takes long, and the sidecar waits longer before the
        # next sample.
        assert wait_for(lambda: newest("hw.errors", semantics.ERROR_TYPE, "xid"), 60) == 1
        assert wait_for(lambda: newest("hw.errors", semantics.ERROR_TYPE, "pcie_replay"), 60) == 3
        for rank in ranks:
            rank.close()
        assert process.wait(30) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
    points = receiver.points()
    hardware = [point for point in points if point.metric.startswith("hw.")]

    assert {point.attributes[semantics.HARDWARE_ID] for point in hardware} == {FIRST, SECOND}
    assert {point.attributes[semantics.HARDWARE_TYPE] for point in hardware} == {"gpu"}
    assert {
        (point.resource["host.name"], point.resource.get(semantics.RANK)) for point in hardware
    } == {(HOST, None)}
    for metric, attributes, wanted in (
        ("hw.energy", {}, 900),
        ("hw.gpu.throttle.duration", {semantics.THROTTLE_REASON: "hw_thermal"}, 0.4),
        ("hw.errors", {semantics.ERROR_TYPE: "ecc_uncorrected"}, 0),
        ("hw.temperature", {semantics.SENSOR: "gpu"}, 88),
        ("hw.power", {}, 498.123),
        ("hw.gpu.memory.usage", {}, 100 << 30),
        ("hw.gpu.memory.limit", {}, 141 << 30),
        ("hw.gpu.tensor.utilization", {}, 0.55),
        ("hw.gpu.utilization", {semantics.GPU_TASK: "general"}, 0.98),
    ):
        assert values(points, metric, SECOND, attributes)[-1] == pytest.approx(wanted), metric
    samples = read_samples(run, GPUS, HOST)
    assert set(samples) == {FIRST, SECOND}
    assert [sample["last_xid"] for sample in samples[SECOND]][-1] == 79
    rows = {row["uuid"]: row for row in build_report(run.run_id, node_state.load_all(run))["gpus"]}
    assert (rows[FIRST]["ranks"], rows[SECOND]["ranks"]) == ([0, 1], [2])
    assert (rows[SECOND]["signals"]["sm_clock_share"], rows[SECOND]["xids"]) == (0.5, 1)
    assert "GPUs" in run.report.read_text()


class Exported:
    """The instruments of an exporter, which the test can read at any time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._meter = ArrayMeter()
        self.metrics = HardwareMetrics(self._meter, lambda: self.now_s)

    def points(self) -> dict[tuple[str, str], float]:
        """Return points by metric and identifying attributes, in order of their names."""
        return {
            (metric.name, " ".join(str(told) for name, told in sorted(point.attributes.items()) if name not in SAME)):
            point.value
            for metric in self._meter.collect()
            for point in metric.data.data_points
        }  # fmt: skip


SAME = (semantics.HARDWARE_ID, semantics.HARDWARE_NAME, semantics.HARDWARE_TYPE)


def test_missing_hardware_value_has_no_point() -> None:
    """A missing value is neither sent as 0 nor as the previous value."""
    exported = Exported()
    exported.metrics.record_samples(
        HardwareSamples((gpu_sample("GPU-1", 0, temperature_c=61),), {})
    )
    assert exported.points() == {("hw.temperature", "gpu"): 61}
    exported.now_s = 40.0
    assert exported.points() == {}


def test_fast_changing_gauges_are_means_since_the_last_export() -> None:
    """Clocks, power and activity are means over all samples. Other gauges have the newest value."""
    exported = Exported()
    for power_w, degrees in ((100.0, 50), (300.0, 70)):
        exported.metrics.record_samples(
            HardwareSamples(
                (gpu_sample("GPU-1", 0, power_w=power_w, temperature_c=degrees),),
                {"GPU-1": "H200"},
            )
        )
    assert exported.points() == {("hw.power", ""): 200, ("hw.temperature", "gpu"): 70}
    assert exported.points()["hw.power", ""] == 300


def test_port_metrics_have_growth_rate_and_link_state() -> None:
    """The metrics are increases of bytes and errors, the link's rate in bytes, and whether the link
    is up.
    """
    exported = Exported()
    grown = {"transmitted_bytes": 4000, "symbol_errors": 2, "ack_timeouts": 0}
    link = port_sample("mlx5_0", 1, active=True, rate_bits=400_000_000_000, grown=grown)
    for _ in range(2):
        exported.metrics.record_samples(HardwareSamples((link,), {}))
    assert exported.points() == {
        ("hw.network.io", "transmit"): 8000,
        ("hw.errors", "symbol_error"): 4,
        ("hw.errors", "ack_timeout"): 0,
        ("hw.network.up", ""): 1,
        ("hw.network.bandwidth.limit", ""): 5e10,
    }
