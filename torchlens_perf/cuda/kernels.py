"""Compile and load the CUDA kernels through CuPy.

CuPy compiles the kernels with NVRTC for the current device and caches the result on disk.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchlens_perf.errors import DeviceError
from torchlens_perf.interruption import ours
from torchlens_perf.run.installation import build_install_command

SOURCE = Path(__file__).with_name("kernels.cu")
NAMES = ("stamp", "reduce_window", "merged_quantiles", "rank_scores")
# Without fused multiply-adds, scores equal those of the NumPy implementation in
# tests/support/device/ bit for bit.
OPTIONS = ("--std=c++17", "--fmad=false")

# Kernel handles by device, with references to CuPy's modules, which would otherwise be unloaded.
_loaded: dict[int, tuple[dict[str, int], Any]] = {}
# Error of CuPy's import. A failed import is not repeated, because it may take seconds.
_import_error = ""


def has_cupy() -> bool:
    """Return True if CuPy is installed, without importing it."""
    return importlib.util.find_spec("cupy") is not None


def load_kernels(device: int) -> dict[str, int]:
    """Return the kernels' handles for cuLaunchKernel by name.

    The first call for a device compiles the kernels in about a second. Raises DeviceError if CuPy
    is missing, broken or unable to compile them.
    """
    if device not in _loaded:
        cupy = _import_cupy()
        with _convert_errors("CuPy cannot load the kernels"), cupy.cuda.Device(device):
            module = cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS)
            functions = {name: module.get_function(name) for name in NAMES}
            handles = {name: int(function.kernel.ptr) for name, function in functions.items()}
        _loaded[device] = handles, (module, functions)
    return _loaded[device][0]


@contextmanager
def _convert_errors(what: str) -> Iterator[None]:
    """Convert all exceptions to DeviceError. CuPy's exceptions have no common base class."""
    try:
        yield
    except DeviceError:
        raise
    except ours(Exception) as error:
        raise DeviceError(f"{what}: {type(error).__name__}: {error}") from None


def _import_cupy() -> Any:
    """Import CuPy.

    Raises DeviceError. A broken CuPy causes the same message in each call.
    """
    global _import_error
    if _import_error:
        raise DeviceError(_import_error)
    if not has_cupy():
        raise DeviceError(f"CuPy is missing: {build_install_command('cuda13')} (CUDA 12: [cuda12])")
    try:
        with _convert_errors("CuPy cannot be imported"):
            import cupy
    except DeviceError as error:
        _import_error = str(error)
        raise
    return cupy


def raise_shared_memory_limit(device: int, ranks: int) -> None:
    """Raise the shared memory limit of the kernel rank_scores, which needs four bytes per rank.

    Raises DeviceError if the device has too little shared memory (a T4 has enough for about 14000
    ranks).
    """
    load_kernels(device)
    cupy = _import_cupy()
    _, functions = _loaded[device][1]
    with (
        _convert_errors(f"{ranks} ranks cannot be compared on this device"),
        cupy.cuda.Device(device),
    ):
        functions["rank_scores"].max_dynamic_shared_size_bytes = 4 * ranks
