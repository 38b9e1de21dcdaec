"""Results of other programs: an NVTX tool's counts, and compute-sanitizer on the kernels."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_check.lines import Checks

ROOT = Path(__file__).parent.parent.parent
NVTX_STEPS = 5
NVTX_PROGRAM = f"""
import torch, torchlens_perf as perf
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with perf.watch(model, optimizer, dir="runs", sidecar=False, report="off"):
    for _ in range({NVTX_STEPS}):
        with perf.section("mine"):
            model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
"""


def nvtx(checks: Checks) -> None:
    """Count ranges by name with an injection library instead of Nsight Systems."""
    count_ranges(checks, NVTX_PROGRAM)


def count_ranges(checks: Checks, program: str) -> None:
    """Run a program under the injection library, and compare the counts of its ranges."""
    compiler = shutil.which("gcc")
    if importlib.util.find_spec("nvtx") is None or compiler is None:
        checks.missing("nvtx", "ranges by name", "needs the package nvtx, and gcc")
        return
    with tempfile.TemporaryDirectory() as folder:
        library, out = Path(folder) / "libcounter.so", Path(folder) / "counts"
        source = ROOT / "tests" / "support" / "nvtx_counter.c"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", library, source], check=True
        )
        variables = {"NVTX_INJECTION64_PATH": str(library), "NVTX_COUNTER_OUT": str(out)}
        environ = {**os.environ, **variables}
        subprocess.run([sys.executable, "-c", program], cwd=folder, env=environ, check=True)
        rows = [line.split("\t") for line in out.read_text().splitlines()]
    ours = {row[1]: (int(row[2]), int(row[3])) for row in rows if row[0] == "torchlens_perf"}
    wanted = dict.fromkeys(
        ("mine", "forward Linear", "backward", "optimizer SGD"), (NVTX_STEPS, NVTX_STEPS)
    )
    found = {name: ours.get(name, (0, 0)) for name in wanted}
    value = ", ".join(f"{name} {begun}" for name, (begun, _) in found.items())
    checks.bar("nvtx", "ranges begun and ended", value, f"{NVTX_STEPS} each", found == wanted)


def sanitizer(checks: Checks, check: str) -> None:
    """Run memcheck or racecheck over every kernel, on the inputs of the equality check."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        checks.missing(check, "kernels", "compute-sanitizer is not installed")
        return
    kernels = (
        f"kns={name}" for name in ("reduce_window", "merged_quantiles", "rank_scores", "stamp")
    )
    command = [tool, "--tool", check, "--error-exitcode", "9"]
    # torch causes some API errors on purpose.
    command += ["--report-api-errors", "no"] if check == "memcheck" else []
    command += [word for kernel in kernels for word in ("--kernel-regex", kernel)]
    command += [sys.executable, "-m", "benchmarks.gpu_check.part", "kernels"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    summary = [line for line in run.stdout.splitlines() if "SUMMARY" in line]
    if not summary:
        reason = (run.stdout + run.stderr).strip().splitlines()[-1:] or ["no output"]
        checks.missing(check, "kernels", reason[0][:80])
        return
    checks.bar(check, "kernels", summary[-1].strip("= "), "0 errors", run.returncode == 0)
