"""TraceML's verdicts on the fault campaign: from runs under TraceML, and from our recorded timings.

    PYTHON_WITH_TRACEML -m benchmarks.planted_traceml FOLDER

diagnoses the runs recorded in FOLDER with TraceML's own analyzer and rules. Both tools then judge
the same steps of the same runs. planted_faults.py calls this module after it has run the seeds
under TraceML itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.planted_truth import Truth

TRAINING = Path(__file__).parent / "planted_training.py"
RUN_TIMEOUT_S = 180
# Number of steps in TraceML's live view.
LIVE_WINDOW_STEPS = 100


def run_all(truths: list[Truth], out: Path, python: Path, environ: dict[str, str]) -> None:
    """Run each seed that has no summary yet, and diagnose all recorded runs.

    Each final_summary.json is stored as OUT/traceml/KIND-SEED.json. `python` is the interpreter of
    an environment with traceml-ai, torch and pandas.
    """
    # This setting keeps our package out of TraceML's processes.
    environ = {**environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    (out / "traceml").mkdir(parents=True, exist_ok=True)
    for truth in truths:
        kept = out / "traceml" / f"{truth.name}.json"
        if kept.exists():
            continue
        begin_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            failed = _run(truth, Path(folder), python, environ)
            summary = Path(folder) / "run" / "final_summary.json"
            if summary.exists():
                shutil.copyfile(summary, kept)
            else:
                failed = failed or "no summary"
        print(f"{truth.name}  {time.monotonic() - begin_s:.1f} s  {failed}", flush=True)
    subprocess.run([python, "-m", "benchmarks.planted_traceml", str(out)], env=environ, check=True)


def free_port() -> int:
    """Return a free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _run(truth: Truth, folder: Path, python: Path, environ: dict[str, str]) -> str:
    """Run one seed. Return an error message, or ""."""
    launcher = [str(python.parent / "traceml"), "run", str(TRAINING), "--mode", "summary"]
    launcher += [
        "--nproc-per-node",
        str(truth.ranks),
        "--logs-dir",
        str(folder),
        "--run-name",
        "run",
    ]
    # Use free ports, because the aggregator of a killed run could still use the default one.
    launcher += ["--aggregator-port", str(free_port()), "--master-port", str(free_port())]
    command = [*launcher, "--args", "--traceml", f"{truth.kind}:{truth.seed}"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code == 0:
        return ""
    tail = (folder / "log").read_text(errors="replace")[-500:]
    return f"{'still running' if code is None else f'exit code {code}'}: {tail}"


def diagnose(folder: Path, window_steps: int | None) -> dict[str, Any]:
    """Return TraceML's diagnosis of a recorded run: {"kind", "ranks"}.

    `window_steps` is the number of last steps to diagnose. None means all steps, as in TraceML's
    summary.
    """
    import pandas as pd
    from traceml_ai.diagnostics.step_time.api import diagnose_step_time_window
    from traceml_ai.diagnostics.step_time.policy import LIVE_STEP_TIME_POLICY
    from traceml_ai.step_time.analysis import StepTimeAnalyzer
    from traceml_ai.step_time.model import (
        StepTimeClockValues,
        StepTimeRepositorySnapshot,
        StepTimeSourceRow,
    )

    run = folder / json.loads((folder / "truth.json").read_text())["run"]
    steps = pd.read_parquet(run / "steps")
    times_ns = {
        "input_wait": steps["data_ns"],
        "forward": steps["forward_ns"],
        # TraceML times backward() as a whole, including DDP's waits for collectives, and TraceML's
        # rule expects such times.
        "backward": steps["backward_ns"] + steps["communication_ns"],
        "optimizer_step": steps["optimizer_ns"],
        "traced_step_time": steps["duration_ns"] - steps["data_ns"],
    }
    columns = {metric: (column / 1e6).tolist() for metric, column in times_ns.items()}
    rows = tuple(
        StepTimeSourceRow(
            row,
            rank,
            step,
            {metric: StepTimeClockValues(cpu_ms=values[row]) for metric, values in columns.items()},
        )
        for row, (rank, step) in enumerate(
            zip(steps["rank"].tolist(), steps["step"].tolist(), strict=True)
        )
    )
    snapshot = StepTimeRepositorySnapshot(
        rows=rows, global_ranks=tuple(sorted(set(steps["rank"].tolist())))
    )
    window = StepTimeAnalyzer().analyze(snapshot, window_size=window_steps)
    issue = diagnose_step_time_window(window, policy=LIVE_STEP_TIME_POLICY).issues[0]
    return {"kind": issue.kind, "ranks": list(issue.ranks)}


def main(out: Path) -> None:
    """Write the diagnoses of all recorded runs to OUT/traceml/recorded.json: {run: {"summary": ...,
    "live": ...}}.
    """
    found = {
        path.parent.name: {
            "summary": diagnose(path.parent, None),
            "live": diagnose(path.parent, LIVE_WINDOW_STEPS),
        }
        for path in sorted(out.glob("*/truth.json"))
    }
    (out / "traceml").mkdir(exist_ok=True)
    (out / "traceml" / "recorded.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
