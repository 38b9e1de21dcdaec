"""Memory needed for a report on many ranks, which is a part of the job's memory.

See also benchmarks/report_scale.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.report_scale import ON_A_NODE, multiply
from tests.support.processes import ROOT
from torchlens_perf.commands.cli import main

NODES = 16
# Limits for ranks with 96 modules. Within these limits, 4096 ranks need less than 0.8 GB.
STATE_KB_A_RANK, REPORT_KB_A_RANK = 40, 200
# Measure in a separate process, because other code in the test process can allocate memory at any
# time.
MAKE_REPORT = """
import sys, tracemalloc
from pathlib import Path
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
import pyarrow.dataset, torchlens_perf.report.usual_steps  # Code does not grow with the ranks.
tracemalloc.start()
report = load_report(RunDirectory(Path(sys.argv[1])))
print(len(report["ranks"]), tracemalloc.get_traced_memory()[1])
"""


def test_memory_for_a_report_is_small_for_each_rank(tmp_path: Path) -> None:
    """A rank's part of its node's file is included."""
    run, ranks = tmp_path / "run", NODES * ON_A_NODE
    faults = ["--fault", "constant:rank=3,share=0.25,phase=forward"]
    assert (
        main(["simulate", "--ranks", str(ON_A_NODE), "--steps", "300", "--out", str(run), *faults])
        == 0
    )
    written_bytes = multiply(run / "nodes", NODES)
    made = subprocess.run(
        [sys.executable, "-c", MAKE_REPORT, str(run)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    reported, peak_bytes = map(int, made.stdout.split())

    assert reported == ranks
    assert written_bytes / ranks < STATE_KB_A_RANK * 1e3
    assert peak_bytes / ranks < REPORT_KB_A_RANK * 1e3
