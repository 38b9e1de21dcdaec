"""The CUDA device for device sections and merging, through torch's public API and the driver.

Tests replace it by a class with the same methods that needs no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchlens_perf.cuda import kernels
from torchlens_perf.cuda.aggregate import DeviceAggregate
from torchlens_perf.cuda.driver import Driver
from torchlens_perf.cuda.stamps import DeviceRing
from torchlens_perf.errors import DeviceError
from torchlens_perf.recorder.devices import CONNECTIONS, device_in_use

# Rings by device. They live as long as the process, because captured graphs stamp into them.
_rings: dict[int, DeviceRing] = {}
# Streams for merges by device. They are never destroyed: torch's allocator keeps memory per stream.
_merge_streams: dict[int, Any] = {}


class Device:
    """torch's current CUDA device. HIP is not supported: the kernels read NVIDIA's clock."""

    def stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream().cuda_stream)

    def capturing(self) -> bool:
        import torch

        return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())

    def in_use(self) -> bool:
        """Return True if torch has memory on a device. Creates no context.

        Raises DeviceError if it has memory on several devices.
        """
        return device_in_use() is not None

    def current(self) -> int:
        """Return the index of the current device."""
        import torch

        return int(torch.cuda.current_device())

    def ring(self) -> DeviceRing:
        """Return the process's ring on this device; the first call creates it.

        Creating it compiles and loads the kernels, and allocates and clears memory, which may wait
        for the device. Raises DeviceError.
        """
        device = self.current()
        if device not in _rings:
            if device_in_use() not in (device, None):
                raise DeviceError(
                    f"the current device is {device}, on which this process has no memory"
                )
            driver = Driver()
            with driver.relaxed_captures():  # Another thread may be capturing a graph.
                _rings[device] = DeviceRing(driver, kernels.load(device))
        return _rings[device]

    def group(self) -> Any:
        """Create a separate process group of all ranks. All ranks must call it."""
        import torch.distributed as dist

        return dist.new_group(backend="nccl", group_desc="torchlens_perf")

    def merge(self, ring: DeviceRing, group: Any) -> DeviceAggregate:
        """Return an object that merges this ring with those of all ranks.

        Raises DeviceError if this rank cannot take part.
        """
        import torch
        import torch.distributed as dist

        for variable in (CONNECTIONS, "TORCH_NCCL_BLOCKING_WAIT"):
            if os.environ.get(variable) == "1":
                raise DeviceError(f"with {variable}=1 the job would wait for the merge")
        kernels.allow_ranks(self.current(), dist.get_world_size(group))
        driver, device = Driver(), self.current()
        if device not in _merge_streams:
            # torch's stream pool is shared with other code, which would wait behind the merge for
            # other ranks. So the stream is not taken from the pool.
            _merge_streams[device] = torch.cuda.ExternalStream(driver.new_stream())
        self._aside = _merge_streams[device]
        return DeviceAggregate(self, driver, kernels.load(device), ring, group)

    def all_agree(self, group: Any, *, able: bool) -> bool:
        """Return True if all ranks are able to merge.

        Waits for all ranks and creates the communicator, so it is called at the start of a watch
        only.
        """
        import torch
        import torch.distributed as dist

        flag = torch.full((1,), int(able), dtype=torch.int64, device="cuda")
        dist.all_reduce(flag, dist.ReduceOp.MIN, group)
        return bool(flag.item())

    @contextmanager
    def aside(self) -> Iterator[int]:
        import torch

        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            yield int(self._aside.cuda_stream)

    def zeros(self, words: int) -> Any:
        import torch

        return torch.zeros(words, dtype=torch.int64, device="cuda")

    def words(self, address: int, count: int) -> Any:
        import torch

        return torch.as_tensor(_DeviceWords(address, count), device="cuda")

    def earlier_ring(self) -> DeviceRing | None:
        """Return the ring that an earlier watch has made, or None.

        Graphs may still stamp into it.
        """
        return _rings.get(self.current()) if _rings else None


class _DeviceWords:
    """Device memory of this package in a form that torch.as_tensor() accepts."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<i8", "data": (address, False), "version": 3,
        }  # fmt: skip


def decline_merging(device: Device) -> None:
    """Answer on a rank that does not record, when the other ranks agree on merging: unable."""
    device.all_agree(device.group(), able=False)
