"""What a report on many ranks takes: it is made in the job's own memory. Whole: benchmarks/report_scale."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from benchmarks.report_scale import ON_A_NODE, multiply
from torchlens_perf.commands.cli import main
from torchlens_perf.report.run_report import run_report
from torchlens_perf.run.directory import RunDirectory

NODES = 16
STATE_KB_A_RANK, REPORT_KB_A_RANK = 40, 200  # of 96 modules: 4096 ranks within 0.8 GB


def test_memory_grows_with_ranks_by_little(tmp_path: Path) -> None:
    """A rank's part of its node's file, and of the memory that a report takes while it is made."""
    path = tmp_path / "run"
    faults = ["--fault", "constant:rank=3,share=0.25,phase=forward"]
    assert main(["simulate", "--ranks", str(ON_A_NODE), "--steps", "300", "--out", str(path), *faults]) == 0
    run, ranks = RunDirectory(path), NODES * ON_A_NODE
    written_bytes = multiply(run.nodes, NODES)
    tracemalloc.start()
    try:
        report = run_report(run)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(report["ranks"]) == ranks
    assert written_bytes / ranks < STATE_KB_A_RANK * 1e3
    assert peak_bytes / ranks < REPORT_KB_A_RANK * 1e3
