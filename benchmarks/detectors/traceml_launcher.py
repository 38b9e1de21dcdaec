"""TraceML's launcher, which starts the ranks of a run and writes a summary at the end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.support.servers import free_port

RUN_TIMEOUT_S = 180


def run_under_launcher(
    script: Path,
    arguments: list[str],
    ranks: int,
    folder: Path,
    python: Path,
    environ: dict[str, str],
) -> str:
    """Run a script under TraceML's launcher. Return an error message, or "".

    TraceML writes to FOLDER/run.
    """
    launcher = [str(python.parent / "traceml"), "run", str(script), "--mode", "summary"]
    launcher += [
        "--nproc-per-node",
        str(ranks),
        "--logs-dir",
        str(folder),
        "--run-name",
        "run",
    ]
    # Use free ports, because the aggregator of a killed run could still use the default one.
    launcher += ["--aggregator-port", str(free_port()), "--master-port", str(free_port())]
    command = [*launcher, "--args", *arguments]
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
