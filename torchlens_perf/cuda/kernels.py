"""Compiles and loads the kernels, through CuPy: NVRTC, for the device at hand, cached on disk by CuPy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchlens_perf.errors import DeviceError
from torchlens_perf.run.installation import install_command

SOURCE = Path(__file__).with_name("kernels.cu")
NAMES = ("stamp", "reduce_window", "merged_quantiles", "rank_scores")
# No contraction to fused multiply-adds: scores are those of their twins in NumPy (tests/support/device/), bit for bit.
OPTIONS = ("--std=c++17", "--fmad=false")

_loaded: dict[int, tuple[dict[str, int], Any]] = {}  # by device; CuPy unloads what nobody holds
_broken = ""  # why CuPy could not be imported: it is not tried again, as that may take seconds each time


def has_cupy() -> bool:
    """Whether CuPy is installed. Does not import it."""
    return importlib.util.find_spec("cupy") is not None


def load(device: int) -> dict[str, int]:
    """The kernels' handles for cuLaunchKernel, by name; compiled at the first call for the device, in about a second.

    Raises DeviceError where CuPy is missing, broken or cannot compile them.
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
    """Raise as a DeviceError whatever CuPy raises: its errors have no root in common, and a broken one raises any."""
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        raise DeviceError(f"{what}: {type(error).__name__}: {error}") from None


def _import_cupy() -> Any:
    """Raises DeviceError; of a broken CuPy always the same, which was found at the first call."""
    global _broken
    if _broken:
        raise DeviceError(_broken)
    if not has_cupy():
        raise DeviceError(f"CuPy is missing: {install_command('cuda13')} (CUDA 12: [cuda12])")
    try:
        with _device_errors("CuPy cannot be imported"):
            import cupy
    except DeviceError as error:
        _broken = str(error)
        raise
    return cupy


def allow_ranks(device: int, ranks: int) -> None:
    """Lets rank_scores compare so many, each by four bytes of shared memory: more than a kernel has unasked.

    Raises DeviceError where the device has no such memory (a T4 has it for some 14000 ranks).
    """
    load(device)
    cupy = _import_cupy()
    _, functions = _loaded[device][1]
    with _device_errors(f"{ranks} ranks cannot be compared on this device"), cupy.cuda.Device(device):
        functions["rank_scores"].max_dynamic_shared_size_bytes = 4 * ranks
