"""Reports on recorded runs of one H200, analysed again from their records.

`gpu/NAME` has the spans, steps and hardware samples of a run, and the state that its sidecar saved.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.support.reports import checked
from torchlens_perf.analysis.statistics.hardware import GpuTotals
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.hardware_samples import GPUS, QUANTITIES, Sample
from torchlens_perf.sidecar.replay import replay
from torchlens_perf.verdicts import node_state

RECORDINGS = Path(__file__).parent / "gpu"


def report_on_recording(name: str, folder: Path) -> dict[str, Any]:
    """Return today's report on a recorded run: statistics and findings are made from its records.

    folder: an empty folder for a copy of the run.
    """
    run = RunDirectory(folder / name)
    shutil.copytree(RECORDINGS / name, run.path)
    (saved,) = node_state.load_all(run)
    run.node_state_path(saved.host).unlink()
    replay(run, None)
    (rebuilt,) = node_state.load_all(run)
    for key, process in saved.processes.items():
        again = rebuilt.processes[key]
        process.statistics, process.judged_by = again.statistics, again.judged_by
    saved.findings = rebuilt.findings
    saved.telemetry.gpus.clear()
    for sample in _read_gpu_samples(run):
        saved.telemetry.gpus.setdefault(sample.name, GpuTotals()).add_sample(sample)
    saved.save(run)
    return checked(load_report(run))


def _read_gpu_samples(run: RunDirectory) -> list[Sample]:
    files = sorted((run.path / "gpus").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return [
        Sample(
            GPUS,
            row["uuid"],
            row["monotonic_ns"],
            0,
            {name: row.get(name) for name in QUANTITIES[GPUS]},
        )
        for row in rows
    ]
