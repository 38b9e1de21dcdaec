"""Which device this process computes on. Nothing here initializes one: that would poison a later fork."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torchlens_perf.errors import DeviceError

# With 1, all streams share one queue to the device: a timed event, or a wait, holds up what comes behind it.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_SMALL_SHARE = 0.1  # of the fullest device's memory: what lies on another one by accident


@dataclasses.dataclass(frozen=True)
class DeviceInUse:
    """One device, as torch has it: "cuda", 0."""

    kind: str
    index: int


def accelerator() -> str:
    """The kind of device that torch was built for, or that was added to it: "cuda", also for ROCm, "xpu", ...; "" if
    there is none, or CUDA sees none."""
    import torch

    found = torch.accelerator.current_accelerator()
    if found is None or found.type == "cuda":
        return "cuda" if has_devices() else ""
    return str(found.type)


def has_devices() -> bool:
    """Whether torch was built for CUDA or ROCm and sees a device. Does not initialize CUDA."""
    import torch

    built = torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None
    return built and torch.cuda.device_count() > 0


def accelerator_in_use(kind: str, *, computes_there: bool) -> DeviceInUse | None:
    """The device of that kind on which torch has allocated memory; None while there is none.

    computes_there: the watched models, or a process group's tensors, are known to be on one: then it is the current one
    where its allocator keeps no numbers, as some that are added to torch do not. Raises DeviceError as device_in_use().
    """
    if kind == "cuda":
        index = device_in_use()
        return None if index is None else DeviceInUse(kind, index)
    import torch

    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", lambda: computes_there)
    if not is_initialized():
        return None
    try:
        reserved = {each: torch.accelerator.memory_reserved(each) for each in range(torch.accelerator.device_count())}
    except (RuntimeError, AttributeError):  # its allocator keeps no numbers; an older torch asks none but CUDA's
        reserved = {}
    used = _used_most(reserved)
    if used:
        return DeviceInUse(kind, _only(used))
    return DeviceInUse(kind, torch.accelerator.current_device_index()) if computes_there else None


def device_in_use() -> int | None:
    """The index of the CUDA device on which torch has allocated memory; None while there is none.

    The current device may be another one, without a context: asking it for a stream would make one, of hundreds of
    megabytes. Raises DeviceError where several are in use: spans of one would be marked on another.
    """
    used = devices_in_use()
    return _only(used) if used else None


def devices_in_use() -> list[int]:
    """The indices of the CUDA devices on which torch has allocated memory. Makes no context."""
    import torch

    if not torch.cuda.is_initialized():
        return []
    return _used_most({index: torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())})


def _used_most(reserved: Mapping[int, int]) -> list[int]:
    most = max(reserved.values(), default=0)
    return [index for index, size in reserved.items() if size > 0 and size >= _SMALL_SHARE * most]


def _only(used: list[int]) -> int:
    if len(used) > 1:
        raise DeviceError(f"this process computes on {len(used)} devices, of which none is timed")
    return used[0]
