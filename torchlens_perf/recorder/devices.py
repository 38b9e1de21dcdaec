"""Which device this process computes on."""

from __future__ import annotations

from torchlens_perf.errors import DeviceError

# With 1, all streams share one queue to the device: a timed event, or a wait, holds up what comes behind it.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_SMALL_SHARE = 0.1  # of the fullest device's memory: what lies on another one by accident


def has_devices() -> bool:
    """Whether torch was built for devices and sees one. Does not initialize CUDA: that would poison a later fork."""
    import torch

    built = torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None
    return built and torch.cuda.device_count() > 0


def device_in_use() -> int | None:
    """The index of the device on which torch has allocated memory; None while there is none.

    The current device may be another one, without a context: asking it for a stream would make one, of hundreds of
    megabytes. Raises DeviceError where several are in use: spans of one would be marked on another.
    """
    used = devices_in_use()
    if len(used) > 1:
        raise DeviceError(f"this process computes on {len(used)} devices, of which none is timed")
    return used[0] if used else None


def devices_in_use() -> list[int]:
    """The indices of the devices on which torch has allocated memory. Makes no context."""
    import torch

    if not torch.cuda.is_initialized():
        return []
    reserved = {index: torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())}
    most = max(reserved.values(), default=0)
    return [index for index, size in reserved.items() if size > 0 and size >= _SMALL_SHARE * most]
