"""Compilation and loading of the kernels through CuPy.

CuPy compiles them with NVRTC for the present device and caches the result on disk.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchlens_perf.errors import DeviceError
from torchlens_perf.run.installation import build_install_command

SOURCE = Path(__file__).with_name("kernels.cu")
NAMES = ("stamp", "reduce_window", "merged_quantiles", "rank_scores")
# Without fused multiply-adds, scores equal those of the NumPy implementation in
# tests/support/device/ bit for bit.
OPTIONS = ("--std=c++17", "--fmad=false")

# By device. CuPy unloads modules without a reference.
_loaded: dict[int, tuple[dict[str, int], Any]] = {}
# Why CuPy could not be imported. The import is not tried again, as each try may take seconds.
_import_error = ""


def has_cupy() -> bool:
    """Return True if CuPy is installed. Does not import it."""
    return importlib.util.find_spec("cupy") is not None


def load(device: int) -> dict[str, int]:
    """Return the kernels' handles for cuLaunchKernel by name.

    The first call for a device compiles them in about a second. Raises DeviceError if CuPy is
    missing, broken or unable to compile them.
    """
    if device not in _loaded:
        cupy = _import_cupy()
        with _device_errors("CuPy cannot load the kernels"), cupy.cuda.Device(device):
            module = cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS)
            functions = {name: module.get_function(name) for name in NAMES}
            handles = {name: int(function.kernel.ptr) for name, function in functions.items()}
        _loaded[device] = handles, (module, functions)
    return _loaded[device][0]


@contextmanager
def _device_errors(what: str) -> Iterator[None]:
    """Convert all exceptions to DeviceError. CuPy's exceptions have no common base class."""
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        raise DeviceError(f"{what}: {type(error).__name__}: {error}") from None


def _import_cupy() -> Any:
    """Import CuPy.

    Raises DeviceError, for a broken CuPy always with the message of the first call.
    """
    global _import_error
    if _import_error:
        raise DeviceError(_import_error)
    if not has_cupy():
        raise DeviceError(f"CuPy is missing: {build_install_command('cuda13')} (CUDA 12: [cuda12])")
    try:
        with _device_errors("CuPy cannot be imported"):
            import cupy
    except DeviceError as error:
        _import_error = str(error)
        raise
    return cupy


def allow_ranks(device: int, ranks: int) -> None:
    """Raise the shared memory limit of rank_scores, which needs four bytes per rank.

    Raises DeviceError if the device has too little shared memory (a T4 has enough for about 14000
    ranks).
    """
    load(device)
    cupy = _import_cupy()
    _, functions = _loaded[device][1]
    with (
        _device_errors(f"{ranks} ranks cannot be compared on this device"),
        cupy.cuda.Device(device),
    ):
        functions["rank_scores"].max_dynamic_shared_size_bytes = 4 * ranks
