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
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.lines import Checks
from benchmarks.gpu_check.one_gpu import refusal
from benchmarks.gpu_check.parts import CUDA
from benchmarks.planted_device_truth import plant
from benchmarks.planted_devices import live, training
from benchmarks.planted_faults import started
from benchmarks.planted_on import DEVICES
from benchmarks.planted_truth import Truth
from benchmarks.planted_verdicts import score

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
RANKS, STEPS, SEED = 2, 120, 1
# The device's work hides shorter delays of the host. Hidden delays must not be reported.
HOST_MS = (120, 160)
_RUN_S = 60


def planted(checks: Checks) -> None:
    """Run each fault once under DDP, beginning with the loops whose hosts run ahead."""
    check(checks, os.environ["GPU_CHECK_DEVICE"])


def check(
    checks: Checks, device: str, kinds: Sequence[str] = tuple(FAULTS), steps: int = STEPS
) -> None:
    """Report a line for each run when the run ends."""
    on = DEVICES[device]()
    truths = [plant(kind, SEED, RANKS, steps, on.slowness, HOST_MS) for kind in kinds]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        with started(training(truths, out, out / "store", device, HOST_MS), RANKS, out) as ranks:
            for truth in truths:
                problem = _wait_for(out / truth.name / "truth.json", ranks)
                if problem:
                    logs = "".join(
                        path.read_text(errors="replace") for path in out.glob("rank*.log")
                    )
                    _not_ended(checks, truths[truths.index(truth) :], problem, logs, device)
                    return
                _judge(checks, truth, out / truth.name)


def _wait_for(file: Path, ranks: list[subprocess.Popen[bytes]]) -> str:
    """Wait until the file exists. Return an error message, or ""."""
    deadline_s = time.monotonic() + _RUN_S
    while time.monotonic() < deadline_s:
        codes = [rank.poll() for rank in ranks]
        if file.exists():
            return ""
        failed = [rank for rank, code in enumerate(codes) if code is not None]
        if failed:
            return f"rank {failed[0]} ended with {codes[failed[0]]}"
        time.sleep(0.1)
    return f"not done within {_RUN_S} s"


def _judge(checks: Checks, truth: Truth, folder: Path) -> None:
    answer = live(folder)
    found = score(truth, answer)
    value = f"rank {answer.rank}, {answer.phase}" if answer else "nobody"
    if truth.faults:
        fault = truth.faults[0]
        how = f"{fault.ms} ms" if fault.ms is not None else f"{1 + (fault.share or 0):g} times"
        wanted = f"rank {fault.rank}, {fault.phase} ({how})"
        if fault.phase == "device":
            wanted = f"rank {fault.rank}, a phase of its device ({how})"
        checks.bar("planted", _what(truth), value, wanted, found.right_phase)
    else:
        checks.bar("planted", _what(truth), value, "nobody", not found.named)


def _what(truth: Truth) -> str:
    return f"who is named: {FAULTS[truth.kind]}"


def _not_ended(checks: Checks, truths: list[Truth], problem: str, logs: str, device: str) -> None:
    """Report runs that did not end, as a FAIL unless NCCL refused to run."""
    refused = refusal(logs) if device == CUDA else ""
    for truth in truths:
        if refused:
            checks.missing("planted", _what(truth), f"NCCL, with two ranks on one GPU: {refused}")
        else:
            words = logs.strip().splitlines()[-1:] or ["no word"]
            checks.bar(
                "planted", _what(truth), f"{problem}: {words[0][:120]}", "the run ends", False
            )
