"""Cost of the sidecar's telemetry: samples of a GPU and a network port, and a file of samples.

NVML is the tests' scripted library under the real pynvml. The results therefore contain the real
cost of Python and pynvml, but not the driver's time. `make gpu-check PARTS=nvml` measures the
driver.
"""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Table
from tests.sidecar.telemetry.test_infiniband import port
from tests.support.device.fake_nvml import HOPPER, UUIDS, FakeNvml, compile_nvml
from tests.support.device.shim_kernels import COMPILER
from tests.support.ranks import HOST
from torchlens_perf.run import hardware_samples
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.hardware_samples import GPU_GAUGES, Sample
from torchlens_perf.sidecar.telemetry.gpu import GpuTelemetry
from torchlens_perf.sidecar.telemetry.infiniband import LinkTelemetry
from torchlens_perf.store import samples as store

ROUNDS, SAMPLES, FILE_SAMPLES = 15, 100, 960
GPUS = 4
MAX_US = 1000.0


def main() -> int:
    """Print the table. Return the number of missed bars."""
    if COMPILER is None:
        print("no compiler for the scripted library: not measured", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory() as name:
        return _measure(Path(name))


def _measure(folder: Path) -> int:
    table = Table("in the sidecar", "processor time us", "bar", "")
    nvml = FakeNvml(folder / "gpus.txt")
    os.environ["FAKE_NVML"] = str(nvml.script)
    nvml.gpus = [dict(HOPPER) for _ in range(GPUS)]
    nvml.write()
    nvml.load(compile_nvml(folder / "libnvidia-ml.so.1"))
    telemetry = GpuTelemetry()
    now_ns = 0

    def gpus() -> None:
        nonlocal now_ns
        now_ns += 1_000_000_000
        telemetry.sample_gpus(UUIDS[:GPUS], now_ns, now_ns)

    gpus()
    each_us = _processor_us(gpus) / GPUS
    bar = f"at most {MAX_US:.0f} us"
    table.row(
        "a sample of one GPU that tells everything",
        f"{each_us:.0f}",
        bar,
        table.bar(each_us <= MAX_US),
    )
    sample = telemetry.sample_gpus(UUIDS[:1], now_ns + 1_000_000_000, 0)[UUIDS[0]]
    telemetry.close()
    port(folder / "infiniband")
    links = LinkTelemetry(folder / "infiniband")
    table.row(
        "a sample of one InfiniBand port",
        f"{_processor_us(lambda: links.sample(0, 0)):.0f}",
        "",
        "",
    )
    _write(folder, sample, table)
    return table.missed


def _write(folder: Path, sample: Sample, table: Table) -> None:
    """Write two minutes of samples of eight GPUs, whose values all differ as in a run of some
    hours.
    """
    run = RunDirectory(folder / "run")
    run.create()
    writer, draw = store.SampleWriter(run, HOST), random.Random(1)
    tracemalloc.start()
    samples = [_varied(sample, draw) for _ in range(FILE_SAMPLES)]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    took_us = []
    for _ in range(ROUNDS):
        started_ns = time.process_time_ns()
        writer.write(samples, 1 << 30)
        took_us.append((time.process_time_ns() - started_ns) / 1e3)
    written = min(path.stat().st_size for path in (run.path / "gpus").iterdir())
    table.row(
        f"writing {FILE_SAMPLES} samples of GPUs", f"{statistics.median(took_us):.0f}", "", ""
    )
    print(
        f"\nA sample takes {held / FILE_SAMPLES:.0f} bytes in memory and"
        f" {written / FILE_SAMPLES:.0f} on disk."
    )


def _varied(sample: Sample, draw: random.Random) -> Sample:
    known = {
        name: sample[name]
        for name in (*GPU_GAUGES, *hardware_samples.COUNTERS[hardware_samples.GPUS])
    }
    values = {
        name: type(value)(value * draw.random())
        for name, value in known.items()
        if value is not None
    }
    grown = {name: values[name] for name in sample.grown}
    return dataclasses.replace(sample, values={**sample.values, **values}, grown=grown)


def _processor_us(call: Callable[[], object]) -> float:
    """Return the processor time of one call in us: the median over the rounds."""
    rounds = []
    for _ in range(ROUNDS):
        started_ns = time.process_time_ns()
        for _ in range(SAMPLES):
            call()
        rounds.append((time.process_time_ns() - started_ns) / SAMPLES / 1e3)
    return statistics.median(rounds)
