"""HolisticTraceAnalysis reads the traces of all ranks, and their times are the recorded ones."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.simulated_runs import simulate_run
from torchlens_perf.commands.cli import main

RANKS, STEPS = 2, 30
HTA = Path(__file__).parents[2] / ".venv-hta/bin/python"
ANALYSIS = """
import logging, sys
logging.disable(50)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
print("steps", len(analysis.get_profiler_steps()))
print(analysis.get_temporal_breakdown(visualize=False).to_json(orient="records"))
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on simulated devices."""
    folder = tmp_path_factory.mktemp("chrome")
    run = simulate_run(folder / "run", "--device", ranks=RANKS, steps=STEPS)
    assert main(["report", str(run), "--chrome-traces", str(folder / "traces"), "--quiet"]) == 0
    return folder / "traces"


def read_spans(traces: Path, rank: int) -> list[dict[str, Any]]:
    trace = json.loads(gzip.decompress((traces / f"rank{rank:05d}.json.gz").read_bytes()))
    assert trace["distributedInfo"] == {"rank": rank}
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_each_rank_has_its_steps_and_kernels(traces: Path) -> None:
    for rank in range(RANKS):
        spans = read_spans(traces, rank)
        steps = [span for span in spans if span["name"].startswith("ProfilerStep#")]
        assert [step["name"] for step in steps] == [f"ProfilerStep#{at}" for at in range(STEPS)]
        kernels = [span for span in spans if span["cat"] == "kernel"]
        assert {"forward", "backward"} <= {kernel["name"] for kernel in kernels}
        assert any(kernel["name"].startswith("ncclDevKernel_") for kernel in kernels)
        for before, after in itertools.pairwise(kernels):
            if before["args"] == after["args"]:
                assert before["ts"] + before["dur"] <= after["ts"]


def test_manifest_lists_the_files_and_the_clocks(traces: Path) -> None:
    lines = [json.loads(line) for line in (traces / "manifest.jsonl").read_text().splitlines()]
    files = {line["rank"]: line["file"] for line in lines if "rank" in line}
    assert files == {rank: f"rank{rank:05d}.json.gz" for rank in range(RANKS)}
    about = next(line for line in lines if line.get("name") == "about this trace")
    assert "one node" in about["clocks"]


def test_folder_with_files_is_not_replaced(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = traces.parent / "run"
    assert main(["report", str(run), "--chrome-traces", str(traces), "--quiet"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert sorted(path.name for path in traces.parent.iterdir()) == ["run", "traces"]


@pytest.mark.skipif(not HTA.exists(), reason="HTA is not installed: `make .venv-hta/ready`")
def test_holistic_trace_analysis_divides_the_time_of_each_rank(traces: Path) -> None:
    command = [str(HTA), "-c", ANALYSIS, str(traces)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *_, steps, table = done.stdout.strip().splitlines()
    # HTA leaves out the last step.
    assert steps == f"steps {STEPS - 1}"
    rows = json.loads(table)
    assert [row["rank"] for row in rows] == [*range(RANKS)]
    assert all(row["compute_time_pctg"] > 50 for row in rows)
