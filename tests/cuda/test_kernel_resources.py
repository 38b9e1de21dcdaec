"""Resources of the kernels as reported by NVIDIA's compiler, which needs no device."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.device.shim_kernels import KERNELS

nvcc = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(
    nvcc is None, reason="nvcc, which reports registers and spills, is not here"
)
# Upper limits of registers per thread. A stamp should use few. With over 64 registers, blocks of 1024
# threads could not run.
MAX_REGISTERS = {"stamp": 24, "reduce_window": 48, "merged_quantiles": 40, "rank_scores": 40}
MAX_STATIC_SHARED = {"stamp": 0, "reduce_window": 6144, "merged_quantiles": 0, "rank_scores": 8448}


def report(architecture: str, target: Path) -> dict[str, dict[str, int]]:
    """Return registers, stack, spills and static shared memory by kernel."""
    flags = [
        "-std=c++17",
        "-O3",
        "--fmad=false",
        f"-arch={architecture}",
        "-cubin",
        "-Xptxas",
        "-v",
        "-Werror",
    ]
    command = [str(nvcc), *flags, "all-warnings", "-o", str(target), str(KERNELS)]
    log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = {}
    for name, text in re.findall(
        r"Compiling entry function '(\w+)'[^\n]*\n(.*?)(?=ptxas info *: Compiling|\Z)", log, re.S
    ):
        numbers = {
            what: int(number)
            for what, pattern in (
                ("stack", r"(\d+) bytes stack frame"),
                ("spill_stores", r"(\d+) bytes spill stores"),
                ("spill_loads", r"(\d+) bytes spill loads"),
                ("registers", r"Used (\d+) registers"),
            )
            for number in re.findall(pattern, text)
        }
        shared = re.search(r"(\d+) bytes smem", text)
        found[name] = {**numbers, "shared": int(shared[1]) if shared else 0}
    return found


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_kernels_spill_no_registers_and_fill_a_multiprocessor(
    architecture: str, tmp_path: Path
) -> None:
    """Kernels use no local memory, and few enough registers for a full multiprocessor."""
    kernels = report(architecture, tmp_path / "kernels.cubin")
    assert kernels.keys() == MAX_REGISTERS.keys()
    for name, used in kernels.items():
        assert (used["stack"], used["spill_stores"], used["spill_loads"]) == (0, 0, 0), name
        assert used["registers"] <= MAX_REGISTERS[name], (name, used)
        assert used["shared"] <= MAX_STATIC_SHARED[name], (name, used)
