"""Planted stragglers: two DDP ranks with a fault in one of them, and the rank named by the live
sidecar.

The runs are chosen from the campaign on devices (benchmarks/planted_devices.py) and use the
requested device. On CUDA both ranks are on one GPU (one_gpu.py). gloo cannot replace NCCL here:
gloo's collectives block the host, so host times show the slow rank; with NCCL, host times do not.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.gpu_check.lines import Checks
from benchmarks.gpu_check.one_gpu import refusal
from benchmarks.gpu_check.parts import CUDA
from benchmarks.planted_device_truth import plant
from benchmarks.planted_devices import live, training
from benchmarks.planted_faults import started
from benchmarks.planted_on import DEVICES
from benchmarks.planted_truth import Truth
from benchmarks.planted_verdicts import Suspect, score

FAULTS = {
    "launch-clean": "nothing, no wait for the device, bound by launches",
    "launch-forward": "a slow host, no wait for the device, bound by launches",
    "mixed-forward": "a slow host, forward bound by launches, backward by the device",
    "ahead-backward": "a spin in one backward, no wait for the device",
    "ddp-slow_device": "every module is slower",
    "ddp-data": "a slow loader",
    "ddp-backward": "a spin in one backward",
    "ddp-item": "a fault, and .item() in every step",
    "ddp-clean": "nothing",
    "ddp-clean_item": "nothing, .item() in every step",
}
RANKS, STEPS, SEED = 2, 90, 1
# The device's work hides shorter delays of the host. Hidden delays must not be reported.
HOST_MS = (120, 160)


def planted(checks: Checks, kind: str) -> None:
    """Run one fault under DDP, and report the rank that the live sidecar names."""
    device = os.environ["GPU_CHECK_DEVICE"]
    on = DEVICES[device]()
    truth = plant(kind, SEED, RANKS, STEPS, on.slowness, HOST_MS)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        with started(training([truth], out, out / "store", device, HOST_MS), RANKS, out) as ranks:
            problem = _wait_for(out / truth.name / "truth.json", ranks, checks.left_s - 1)
            if problem:
                logs = "".join(path.read_text(errors="replace") for path in out.glob("rank*.log"))
                _not_ended(checks, truth, problem, logs, device)
            else:
                judge(checks, truth, live(out / truth.name))


def _wait_for(file: Path, ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Wait until the file exists. Return an error message, or ""."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        codes = [rank.poll() for rank in ranks]
        if file.exists():
            return ""
        failed = [rank for rank, code in enumerate(codes) if code is not None]
        if failed:
            return f"rank {failed[0]} ended with {codes[failed[0]]}"
        time.sleep(0.1)
    return f"not done within {timeout_s:.0f} s"


def judge(checks: Checks, truth: Truth, answer: Suspect | None) -> None:
    """Compare the named rank and phase with the planted ones."""
    found = score(truth, answer)
    value = f"rank {answer.rank}, {answer.phase}" if answer else "nobody"
    if not truth.faults:
        checks.bar(_part(truth), _what(truth), value, "nobody", not found.named)
        return
    fault = truth.faults[0]
    how = f"{fault.ms:.3g} ms" if fault.ms is not None else f"{1 + (fault.share or 0):g} times"
    phase = "a phase of its device" if fault.phase == "device" else fault.phase
    wanted = f"rank {fault.rank}, {phase} ({how})"
    checks.bar(_part(truth), _what(truth), value, wanted, found.right_phase)


def _part(truth: Truth) -> str:
    return f"planted-{truth.kind}"


def _what(truth: Truth) -> str:
    return f"who is named: {FAULTS[truth.kind]}"


def _not_ended(checks: Checks, truth: Truth, problem: str, logs: str, device: str) -> None:
    """Report a run that did not end, as a FAIL unless NCCL refused to run."""
    refused = refusal(logs) if device == CUDA else ""
    if refused:
        reason = f"NCCL, with two ranks on one GPU: {refused}"
        checks.missing(_part(truth), _what(truth), reason)
        return
    words = logs.strip().splitlines()[-1:] or ["no output"]
    value = f"{problem}: {words[0][:120]}"
    checks.bar(_part(truth), _what(truth), value, "the run ends", False)
