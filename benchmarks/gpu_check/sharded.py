"""Two ranks under FSDP2 and under tensor parallelism, and two ranks of which one device hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.lines import Checks
from benchmarks.gpu_check.one_gpu import refusal
from benchmarks.gpu_check.parts import CUDA
from benchmarks.gpu_check.sharded_ranks import HANGS, SPIN_MS
from benchmarks.planted_faults import started
from torchlens_perf.errors import RunStoreError
from torchlens_perf.report.report_json import to_json_types
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

RANKS = 2
# Allowed difference of the median forward pass and the check's own events around it: a share, and ms.
# Elsewhere than on CUDA the host is interrupted between the two, for as long as a slice of its CPU.
_ALLOWED = {CUDA: (0.02, 0.1)}
_ALLOWED_ELSEWHERE = (0.05, 3.0)
# A fault of 10 ms in one forward pass must show by more than this, and less than this.
_SHOWN_MS = (6.0, 16.0)


def sharded(checks: Checks, kind: str) -> None:
    """Compare parameters and forward passes. Rank 1 has 10 ms more work in each forward pass."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        with started(_command(kind, out), RANKS, out) as ranks:
            problem = _wait(ranks, checks.left_s - 1)
        if problem:
            _report_problem(checks, kind, problem, out)
            return
        judge_sharded(checks, kind, [json.loads((out / f"{n}.json").read_text()) for n in range(2)])


def judge_sharded(checks: Checks, kind: str, ranks: list[dict[str, Any]]) -> None:
    """Report bits, times and the rank with more work. ranks: the files of the rank processes."""
    equal = all(rank["with"] == rank["without"] for rank in ranks)
    checks.bar(kind, "parameters with a watch", "equal" if equal else "differ", "equal", equal)
    share, least_ms = _ALLOWED.get(os.environ.get("GPU_CHECK_DEVICE", CUDA), _ALLOWED_ELSEWHERE)
    for number, rank in enumerate(ranks):
        what = f"forward of rank {number}"
        if rank["forward_ms"] is None:
            checks.bar(kind, what, "not recorded", "recorded", False)
            continue
        found_ms, true_ms = rank["forward_ms"]
        bar = f"{true_ms:.2f} ms +- {share:.0%} + {least_ms:g} ms"
        met = abs(found_ms - true_ms) <= share * true_ms + least_ms
        checks.bar(kind, what, f"{found_ms:.2f} ms", bar, met)
    more_ms = ranks[HANGS]["work_ms"] - ranks[1 - HANGS]["work_ms"]
    bar = f"{_SHOWN_MS[0]:g} to {_SHOWN_MS[1]:g} ms, planted {SPIN_MS:g} ms"
    met = _SHOWN_MS[0] <= more_ms <= _SHOWN_MS[1]
    checks.bar(kind, f"more work of rank {HANGS}", f"{more_ms:.2f} ms", bar, met)


def hang(checks: Checks) -> None:
    """Wait for the live sidecar to name the rank whose device has hung."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        with started(_command("hang", out), RANKS, out) as ranks:
            verdict: dict[str, Any] | None = None
            while verdict is None and checks.left_s > 1:
                time.sleep(0.2)
                if any(rank.poll() is not None for rank in ranks):
                    _report_problem(checks, "hang", "a rank ended", out)
                    return
                verdict = _hang_verdict(out / "runs")
        judge_hang(checks, verdict)


def judge_hang(checks: Checks, verdict: dict[str, Any] | None) -> None:
    """Compare the named rank with the one that hangs.

    The host of this rank goes on until its queue is full. The verdict is about the rank's device,
    or about the collective that its host did not enter.
    """
    value = "no verdict" if verdict is None else str(verdict["explanation"])[:200]
    met = verdict is not None and list(verdict["evidence"]["ranks"]) == [HANGS]
    checks.bar("hang", "a kernel that never ends", value, f"rank {HANGS} is named", met)


def _hang_verdict(runs: Path) -> dict[str, Any] | None:
    for path in runs.glob("*/nodes"):
        try:
            report = load_report(RunDirectory(path.parent), lost_time=False)
        except RunStoreError:
            continue
        verdicts: list[dict[str, Any]] = to_json_types(report["verdicts"])
        return next((each for each in verdicts if each["kind"] == "hang"), None)
    return None


def _command(kind: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_check.sharded_ranks", kind, str(out)]


def _wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Wait for the ranks. Return an error message, or ""."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        codes = [rank.poll() for rank in ranks]
        if any(codes):
            return f"exit codes {codes}"
        if None not in codes:
            return ""
        time.sleep(0.1)
    return f"not done within {timeout_s:.0f} s"


def _report_problem(checks: Checks, part: str, problem: str, out: Path) -> None:
    logs = "".join(path.read_text(errors="replace") for path in sorted(out.glob("rank*.log")))
    refused = refusal(logs)
    if refused:
        checks.missing(part, "two ranks", f"NCCL, with two ranks on one GPU: {refused}")
        return
    words = logs.strip().splitlines()[-1:] or ["no output"]
    checks.bar(part, "two ranks", f"{problem}: {words[0][:120]}", "they end", False)
