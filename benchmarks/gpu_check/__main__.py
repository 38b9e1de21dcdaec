"""Runs the parts that are named, or all of them, prints a line each with PASS or FAIL, and exits with 1 on a FAIL.

    python -m benchmarks.gpu_check [PART...]

Without a GPU it exits with 2. Takes less than ten minutes on one like an H200, and no network.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable

import torch

from benchmarks.gpu_check import (
    accuracy,
    allocator,
    captures,
    cost,
    graphs,
    kernel_checks,
    merging,
    nccl,
    telemetry,
    tools,
)
from benchmarks.gpu_check.checks import Checks

# memory and synchronizations come first: they must see how a process makes its first ring.
PARTS: dict[str, Callable[[Checks], None]] = {
    "memory": cost.memory,
    "synchronizations": cost.synchronizations,
    "allocator": allocator.allocator,
    "clock": accuracy.clock,
    "accuracy": accuracy.accuracy,
    "kernels": kernel_checks.equality,
    "floors": kernel_checks.floors,
    "crossover": kernel_checks.crossover,
    "graphs": graphs.graphs,
    "merging": merging.merging,
    "nccl1": nccl.nccl1,
    "nccl2": nccl.nccl2,
    "gaps": cost.gaps,
    "overhead": cost.overhead,
    "nvml": telemetry.nvml,
    "capture": captures.capture,  # after what is timed: CUPTI may stay attached
    "nvtx": tools.nvtx,
    "sanitizer": tools.sanitizer,
}


def main() -> int:
    """The exit code."""
    names = sys.argv[1:] or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"unknown part {unknown[0]}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if torch.version.cuda is None or not torch.cuda.is_available():
        print("no NVIDIA GPU, or a torch without CUDA: nothing was checked", file=sys.stderr)
        return 2
    import cupy

    device = torch.cuda.get_device_properties(0)
    print(f"{device.name}, torch {torch.__version__}, CuPy {cupy.__version__}, Python {sys.version.split()[0]}\n")
    print("| part | what | value | bar | |\n| --- | --- | --- | --- | --- |", flush=True)
    checks = Checks()
    for name in names:
        begin = time.monotonic()
        try:
            PARTS[name](checks)
        except Exception as error:  # the other parts still tell something
            traceback.print_exc()
            checks.bar(name, "the part itself", f"{type(error).__name__}: {error}"[:200], "runs", False)
        print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
        checks.save()
    print(f"\n{checks.failed} FAIL of {len(checks.rows)} lines")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
