"""Devices on which runs with planted faults can train: the tests' asynchronous device and CUDA.

The planted fault is the same on both devices. On the asynchronous device each operator takes a
configured time. On CUDA, operators of a small model take almost no time. On CUDA, each module is
therefore followed by a kernel that spins, in the forward and the backward pass, equally on all
ranks. A spin ends by the device's real-time clock. Two processes on one GPU therefore spin at the
same time, although the GPU runs their kernels in turns.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, autograd

from benchmarks.planted_device_truth import SLOWNESS

# Operators in a module's forward pass and around it on the asynchronous device. A spin replaces
# them.
OPERATORS = 5


class PlantedDevice(Protocol):
    """A device on which a planted run trains."""

    name: str
    """Name of the device in torch."""
    backend: str
    """Backend of its process group."""
    slowness: float
    """Factor by which a slow device's kernels take longer than those of other ranks."""

    def load(self, kernel_s: float, rank: int) -> None:
        """Load the device before the process group is created.

        `kernel_s` is the time of an operator.
        """

    def spin(self, seconds: float) -> None:
        """Enqueue a kernel that takes this long."""

    def set_slowness(self, factor: float) -> None:
        """Set the factor for the duration of all kernels enqueued from now on."""

    def paced(self, kernel_s: float | None) -> AbstractContextManager[None]:
        """Shorten kernels to `kernel_s` for a loop whose step time is the time of the host's code.

        kernel_s: None for other loops.
        """

    def work(self, x: Tensor) -> Tensor:
        """Return x, and spend the module's time in the forward and the backward pass."""


class Spins(autograd.Function):
    """The identity function, whose forward and backward passes spin on the device."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, spin: Callable[[float], None], forward_s: float, backward_s: float
    ) -> Tensor:
        ctx.spin, ctx.seconds = spin, backward_s
        if forward_s:
            spin(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.spin(ctx.seconds)
        return gradients[0], None, None, None


class AsyncDevice:
    """The tests' device, whose streams are threads (tests/device)."""

    slowness = SLOWNESS

    def __init__(self) -> None:
        from tests.device import device

        self._device = device
        self.name = self.backend = device.NAME
        self.spin, self.set_slowness = device.spin, device.set_slowness

    def load(self, kernel_s: float, rank: int) -> None:
        self._device.load()
        self._kernel_s = kernel_s
        self._device.set_kernel_time(kernel_s)

    @contextlib.contextmanager
    def paced(self, kernel_s: float | None) -> Iterator[None]:
        # Kernels that compute would take processors from the hosts, unlike a GPU's kernels.
        self._device.set_kernel_time(self._kernel_s if kernel_s is None else kernel_s)
        self._device.set_computing(kernel_s is None)
        yield
        self._device.set_kernel_time(self._kernel_s)
        self._device.set_computing(True)

    def work(self, x: Tensor) -> Tensor:
        return x


class AsyncModules(AsyncDevice):
    """The asynchronous device with short operators and a spin per module, for testing the CUDA
    variant without a GPU.
    """

    slowness = 2.0

    def load(self, kernel_s: float, rank: int) -> None:
        super().load(kernel_s / 10, rank)
        self._module_s = OPERATORS * kernel_s

    def work(self, x: Tensor) -> Tensor:
        made: Tensor = Spins.apply(x, self.spin, self._module_s, self._module_s)
        return made


class CudaDevice:
    """One GPU shared by all ranks. NCCL treats the ranks as hosts that communicate over sockets."""

    name, backend = "cuda", "nccl"
    # The slowdown must exceed the delay that the turns of two processes on one device hide.
    slowness = 2.0

    def load(self, kernel_s: float, rank: int) -> None:
        from benchmarks.gpu_check.one_gpu import two_hosts

        os.environ.update(two_hosts(rank))
        import torch

        torch.cuda.set_device(0)
        from benchmarks.gpu_check.checks import Spin

        self._spin, self._factor, self._module_s = Spin(), 1.0, OPERATORS * kernel_s
        # The first call compiles the kernel.
        self.spin(0)

    def spin(self, seconds: float) -> None:
        self._spin(round(seconds * self._factor * 1e9))

    def set_slowness(self, factor: float) -> None:
        self._factor = factor

    def paced(self, kernel_s: float | None) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def work(self, x: Tensor) -> Tensor:
        made: Tensor = Spins.apply(x, self.spin, self._module_s, self._module_s)
        return made


DEVICES: dict[str, Callable[[], PlantedDevice]] = {
    "asyncdev": AsyncDevice,
    "asyncdev_modules": AsyncModules,
    "cuda": CudaDevice,
}
