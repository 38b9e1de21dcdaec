"""Print the check's hardware and software as JSON. Exit with 2 if the check cannot run.

The module runs in a separate process, because the queries create a CUDA context.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_check.parts import ASYNC, MODULES
from torchlens_perf.version import VERSION


def _cuda() -> dict[str, str] | str:
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return "no NVIDIA GPU, or a torch without CUDA: nothing was checked"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is missing: nothing was checked"
    import cupy

    device = torch.cuda.get_device_properties(0)
    return {
        "device": (
            f"{device.name}, {device.total_memory >> 30} GiB, one of {torch.cuda.device_count()}"
        ),
        "driver": _driver(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "CuPy": cupy.__version__,
    }


def _driver() -> str:
    """Return the version of NVIDIA's driver. A container may lack /proc/driver or nvidia-smi."""
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text().split("\n")[0].partition("Module")[2].split() if file.is_file() else []
    found = next((word for word in words if word[0].isdigit()), "")
    if not found and shutil.which("nvidia-smi") is not None:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = (
            subprocess.run(command, capture_output=True, text=True, timeout=30)
            .stdout.strip()
            .split("\n")[0]
        )
    return found or "not told"


def _asynchronous() -> dict[str, str] | str:
    import torch

    from tests.device import device

    missing = device.missing()
    if missing:
        return f"{missing}: nothing was checked"
    device.build()
    return {"device": "the tests' asynchronous device, without a GPU", "torch": torch.__version__}


def main() -> int:
    """Print the facts. Return the exit code."""
    found = _asynchronous() if sys.argv[1] in (ASYNC, MODULES) else _cuda()
    if isinstance(found, str):
        print(found, file=sys.stderr)
        return 2
    found["torchlens_perf"] = VERSION
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({**found, "Python": platform.python_version(), "host": f"{cores} processors"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
