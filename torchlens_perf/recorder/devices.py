"""Find the device that this process computes on, without initializing CUDA: an initialized CUDA
cannot be used after a fork.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torchlens_perf.errors import DeviceError
from torchlens_perf.interruption import ours

# With the value 1, all streams share one queue to the device. A timed event or a wait then delays
# all later work.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# A device is ignored if torch has less memory on it than this share of the most used device's.
_SMALL_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class DeviceInUse:
    """One device, by torch's device type and index, such as ("cuda", 0)."""

    kind: str
    index: int


def find_accelerator() -> str:
    """Return torch's device type: "cuda" (also for ROCm), "xpu", ..., or "" without a device."""
    import torch

    found = torch.accelerator.current_accelerator()
    if found is None or found.type == "cuda":
        return "cuda" if has_cuda_devices() else ""
    return str(found.type)


def has_cuda_devices() -> bool:
    """Return True if torch was built for CUDA or ROCm and finds a device.

    CUDA is not initialized.
    """
    import torch

    built = torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None
    return built and torch.cuda.device_count() > 0


def find_accelerator_in_use(kind: str, *, computes_there: bool) -> DeviceInUse | None:
    """Return the device of this type on which torch has allocated memory, or None.

    computes_there: True if the watched models, or a process group's tensors, are on such a device.
    In that case, the current device is returned if the allocator reports no numbers, as in some
    backends. Raises DeviceError as find_cuda_device_in_use() does.
    """
    if kind == "cuda":
        index = find_cuda_device_in_use()
        return None if index is None else DeviceInUse(kind, index)
    import torch

    is_initialized = getattr(
        torch.get_device_module(kind), "is_initialized", lambda: computes_there
    )
    if not is_initialized():
        return None
    try:
        reserved = {
            each: torch.accelerator.memory_reserved(each)
            for each in range(torch.accelerator.device_count())
        }
    # The allocator may report no numbers. Older versions of torch support only CUDA's allocator.
    except ours(RuntimeError, AttributeError):
        reserved = {}
    used = _select_used_devices(reserved)
    if used:
        return DeviceInUse(kind, _require_single_device(used))
    return DeviceInUse(kind, torch.accelerator.current_device_index()) if computes_there else None


def find_cuda_device_in_use() -> int | None:
    """Return the index of the CUDA device on which torch has allocated memory, or None.

    The current device may be another device without a context, and a query of its stream would
    create a context of hundreds of megabytes. Raises DeviceError if several devices are in use,
    because spans of one device would be marked on another.
    """
    used = find_cuda_devices_in_use()
    return _require_single_device(used) if used else None


def find_cuda_devices_in_use() -> list[int]:
    """Return the indices of the CUDA devices on which torch has allocated memory.

    Create no context.
    """
    import torch

    if not torch.cuda.is_initialized():
        return []
    return _select_used_devices(
        {index: torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())}
    )


def _select_used_devices(reserved: Mapping[int, int]) -> list[int]:
    most = max(reserved.values(), default=0)
    return [index for index, size in reserved.items() if size > 0 and size >= _SMALL_SHARE * most]


def _require_single_device(used: list[int]) -> int:
    if len(used) > 1:
        raise DeviceError(f"this process computes on {len(used)} devices, of which none is timed")
    return used[0]
