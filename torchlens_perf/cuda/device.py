"""The CUDA device that times and merges device sections, through torch's public API and the driver.

Tests replace CudaDevice by a class with the same methods that needs no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchlens_perf.cuda import kernels
from torchlens_perf.cuda.aggregate import WindowMerger
from torchlens_perf.cuda.driver import CudaDriver
from torchlens_perf.cuda.stamps import DeviceRing
from torchlens_perf.errors import DeviceError
from torchlens_perf.recorder.devices import CONNECTIONS, find_cuda_device_in_use

# Rings by device. A ring exists until the process ends, because captured graphs write to it.
_rings: dict[int, DeviceRing] = {}
# Streams for merges, by device. They are never destroyed: torch keeps memory per stream.
_merge_streams: dict[int, Any] = {}


class CudaDevice:
    """torch's current CUDA device. HIP is not supported: the kernels read NVIDIA's clock."""

    def stream_handle(self) -> int:
        import torch

        return int(torch.cuda.current_stream().cuda_stream)

    def is_capturing(self) -> bool:
        import torch

        return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())

    def is_in_use(self) -> bool:
        """Return True if torch has allocated memory on a device. This call creates no CUDA context.

        Raises DeviceError if torch has allocated memory on several devices.
        """
        return find_cuda_device_in_use() is not None

    def current_index(self) -> int:
        """Return the index of the current device."""
        import torch

        return int(torch.cuda.current_device())

    def get_or_create_ring(self) -> DeviceRing:
        """Return the process's ring on this device. The first call creates the ring.

        The creation compiles and loads the kernels, then allocates and clears memory, which may
        wait for the device. Raises DeviceError.
        """
        device = self.current_index()
        if device not in _rings:
            if find_cuda_device_in_use() not in (device, None):
                raise DeviceError(
                    f"the current device is {device}, on which this process has no memory"
                )
            driver = CudaDriver()
            with driver.allow_during_captures():  # Another thread may be capturing a graph.
                _rings[device] = DeviceRing(driver, kernels.load_kernels(device))
        return _rings[device]

    def create_process_group(self) -> Any:
        """Create a separate process group of all ranks. All ranks must call it."""
        import torch.distributed as dist

        return dist.new_group(backend="nccl", group_desc="torchlens_perf")

    def create_merger(self, ring: DeviceRing, group: Any) -> WindowMerger:
        """Return an object that merges this rank's ring with the rings of all ranks.

        Raises DeviceError if this rank cannot take part.
        """
        import torch
        import torch.distributed as dist

        for variable in (CONNECTIONS, "TORCH_NCCL_BLOCKING_WAIT"):
            if os.environ.get(variable) == "1":
                raise DeviceError(f"with {variable}=1 the job would wait for the merge")
        kernels.raise_shared_memory_limit(self.current_index(), dist.get_world_size(group))
        driver, device = CudaDriver(), self.current_index()
        if device not in _merge_streams:
            # Do not use torch's stream pool: other code shares its streams and would wait for the
            # other ranks' merges.
            _merge_streams[device] = torch.cuda.ExternalStream(driver.create_stream())
        self._aside = _merge_streams[device]
        return WindowMerger(self, driver, kernels.load_kernels(device), ring, group)

    def all_ranks_agree(self, group: Any, *, able: bool) -> bool:
        """Return True if all ranks are able to merge.

        Called only at the start of a watch, because the call waits and creates the communicator.
        """
        import torch
        import torch.distributed as dist

        flag = torch.full((1,), int(able), dtype=torch.int64, device="cuda")
        dist.all_reduce(flag, dist.ReduceOp.MIN, group)
        return bool(flag.item())

    @contextmanager
    def merge_stream(self) -> Iterator[int]:
        import torch

        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            yield int(self._aside.cuda_stream)

    def allocate_zeros(self, words: int) -> Any:
        import torch

        return torch.zeros(words, dtype=torch.int64, device="cuda")

    def view_words(self, address: int, count: int) -> Any:
        import torch

        return torch.as_tensor(_DeviceWords(address, count), device="cuda")

    def earlier_ring(self) -> DeviceRing | None:
        """Return the ring that an earlier watch has created, or None.

        Captured graphs may still write to that ring.
        """
        return _rings.get(self.current_index()) if _rings else None


class _DeviceWords:
    """Address of device memory in a form that torch.as_tensor() accepts."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<i8", "data": (address, False), "version": 3,
        }  # fmt: skip
