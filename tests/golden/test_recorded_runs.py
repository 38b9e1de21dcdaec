"""Tests of verdicts and alerts of ten recorded training runs, replayed from their records, against
golden files.

scripts/record_golden_runs.py made the runs in recorded/.

The golden files change only on purpose. `UPDATE_GOLDEN=1` writes them, and the commit explains why.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.golden.golden_text import expected_text, golden_text
from tests.support.in_memory import InMemoryExporter
from tests.support.reports import checked
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.sidecar.replay import replay
from torchlens_perf.verdicts import node_state

RECORDED = Path(__file__).parent / "recorded"
RUNS = sorted(each.name for each in RECORDED.iterdir() if each.is_dir())


def test_ten_recorded_runs_are_present() -> None:
    assert len(RUNS) == 10


def replayed(name: str, folder: Path) -> tuple[dict[str, Any], InMemoryExporter]:
    """Replay a recorded run.

    Return the run's report, and the exporter with everything that it received.
    """
    run, exporter = RunDirectory(folder / name), InMemoryExporter()
    run.create()
    shutil.copytree(RECORDED / name / "spans", run.spans, dirs_exist_ok=True)
    replay(run, exporter)
    return checked(build_report(name, node_state.load_all(run))), exporter


@pytest.mark.parametrize("name", RUNS)
def test_report_and_alerts_of_a_replayed_run_equal_the_golden_file(
    name: str, tmp_path: Path
) -> None:
    report, exporter = replayed(name, tmp_path)
    text = golden_text(name.replace("_", " "), report, exporter.alerts)

    assert text == expected_text(text, RECORDED / f"{name}.txt")
