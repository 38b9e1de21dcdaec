"""The device as device sections and merging need it: CUDA, by torch's public names and the driver.

What has these methods can stand in its place: tests have a device without a GPU.
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

_rings: dict[int, DeviceRing] = {}  # by device, for the life of the process: captured graphs stamp into them
# Streams for merges, by device: torch's allocator keeps memory by stream, so none is destroyed.
_asides: dict[int, Any] = {}


class Device:
    """The current device of torch's, as stamps need it. CUDA, not HIP: the kernels read NVIDIA's clock."""

    def stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream().cuda_stream)

    def capturing(self) -> bool:
        import torch

        return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())

    def in_use(self) -> bool:
        """Whether torch has memory on a device. Makes no context. Raises DeviceError where it has on several."""
        return device_in_use() is not None

    def current(self) -> int:
        """Its index."""
        import torch

        return int(torch.cuda.current_device())

    def ring(self) -> DeviceRing:
        """The process's ring on this device, made at the first call: kernels are compiled and loaded, memory is
        allocated and cleared, which may wait for the device. Raises DeviceError."""
        device = self.current()
        if device not in _rings:
            if device_in_use() not in (device, None):
                raise DeviceError(f"the current device is {device}, on which this process has no memory")
            driver = Driver()
            with driver.relaxed_captures():  # another thread may be capturing
                _rings[device] = DeviceRing(driver, kernels.load(device))
        return _rings[device]

    def group(self) -> Any:
        """A process group of our own, of all ranks: a collective."""
        import torch.distributed as dist

        return dist.new_group(backend="nccl", group_desc="torchlens_perf")

    def merge(self, ring: DeviceRing, group: Any) -> DeviceAggregate:
        """Merges this ring with those of all ranks. Raises DeviceError where this rank cannot."""
        import torch
        import torch.distributed as dist

        for variable in (CONNECTIONS, "TORCH_NCCL_BLOCKING_WAIT"):
            if os.environ.get(variable) == "1":
                raise DeviceError(f"with {variable}=1 the job would wait for the merge")
        kernels.allow_ranks(self.current(), dist.get_world_size(group))
        driver, device = Driver(), self.current()
        if device not in _asides:
            # Not one of torch's, which other code draws from too: what waits there for other ranks would be in its way.
            _asides[device] = torch.cuda.ExternalStream(driver.new_stream())
        self._aside = _asides[device]
        return DeviceAggregate(self, driver, kernels.load(device), ring, group)

    def all_agree(self, group: Any, *, able: bool) -> bool:
        """Whether all ranks are able. Waits for them, and makes the communicator; at a watch's beginning only."""
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
        """The ring that an earlier watch has made: graphs may still stamp into it."""
        return _rings.get(self.current()) if _rings else None


class _DeviceWords:
    """Memory that is ours, shown to torch."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<i8", "data": (address, False), "version": 3,
        }  # fmt: skip


def decline_merging(device: Device) -> None:
    """On a rank that does not record, while the others ask all ranks whether they are able: it is not."""
    device.all_agree(device.group(), able=False)
