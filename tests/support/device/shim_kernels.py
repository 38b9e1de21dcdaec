"""The CUDA kernels compiled for this CPU, which tests call with NumPy arrays."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
# scripts/mutate_kernels.py replaces these kernels with changed ones.
KERNELS = Path(
    os.environ.get("MUTATED_KERNELS", HERE.parents[2] / "torchlens_perf" / "cuda" / "kernels.cu")
)
COMPILER = shutil.which("g++")
WITHOUT_COMPILER = "the kernels run on a CPU through g++, which is not here"
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-shared",
    "-fPIC",
)
# The option turns off glibc's fortified longjmp, which reports jumps between fibers as a smashed
# stack.
_FIBERS = ("-U_FORTIFY_SOURCE", "-fno-strict-aliasing")
# One process loads several such libraries, and each must keep its own kernels.
_APART = ("-fno-gnu-unique",)
UNDEFINED_BEHAVIOUR = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")


def compile_kernels(target: Path, *flags: str, kernels: Path = KERNELS) -> Path:
    """Compile kernels.cu or a changed copy of it through the shim. Raises CalledProcessError."""
    source = (
        (HERE / "shim_kernels.cpp")
        .read_text()
        .replace("../../../torchlens_perf/cuda/kernels.cu", str(kernels))
    )
    copy = target.with_suffix(".cpp")
    copy.write_text(source)
    shim = str(HERE / "shim.h")
    subprocess.run(
        [
            str(COMPILER),
            *_FLAGS,
            *_FIBERS,
            *_APART,
            *flags,
            "-include",
            shim,
            "-o",
            str(target),
            str(copy),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return target


class ShimKernels:
    """Launches kernels of a library made by compile_kernels(), with one schedule of threads."""

    def __init__(self, path: Path, schedule: int = 0) -> None:
        """Load the library.

        Schedule 0 runs blocks, warps and lanes in ascending order, and 1 in descending order.

        Other schedules are seeds of a random order.
        """
        self._library = ctypes.CDLL(str(path))
        self._library.shim_launch.argtypes = [
            ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint,
        ]  # fmt: skip
        self._schedule = schedule
        self._clock: Any = None

    def set_clock(self, now_ns: Callable[[], int] | None) -> None:
        """Set the device's clock. With None, the clock advances at each reading."""
        kind = ctypes.CFUNCTYPE(ctypes.c_uint64)
        self._clock = kind() if now_ns is None else kind(now_ns)
        self._library.shim_set_clock(self._clock)

    def launch(
        self, name: str, grid: int, threads: int, arguments: Sequence[Any], shared_bytes: int = 0
    ) -> None:
        """Run the kernel. Arrays are passed by address, NumPy scalars by value."""
        values = [
            (
                ctypes.c_void_p(each.ctypes.data)
                if isinstance(each, np.ndarray)
                else np.ctypeslib.as_ctypes_type(each.dtype)(each.item())
            )
            for each in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        status = self._library.shim_launch(
            name.encode(), grid, threads, shared_bytes, pointers, self._schedule
        )
        assert status == 0, f"no kernel {name}"
