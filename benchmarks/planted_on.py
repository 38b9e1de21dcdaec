"""The devices that a planted run may train on: the tests' asynchronous device, and CUDA.

What is planted is the same on both. On the asynchronous device each operator takes the time that it is told to. CUDA's
operators on a small model take no time that matters; so each module is followed by a kernel that spins, forwards and
backwards, on all ranks alike. Spins last by the device's clock of real time: two processes on one GPU, which runs
one's kernels and then the other's, spin at the same time nevertheless.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, autograd

from benchmarks.planted_device_truth import SLOWNESS

OPERATORS = 5  # of the asynchronous device in a module's forward pass and what is around it: what a spin stands for


class PlantedDevice(Protocol):
    """A device on which a planted run trains."""

    name: str
    """As torch has it."""
    backend: str
    """Of its process group."""
    slowness: float
    """So many times as long as the others' a slow device's kernels take."""

    def load(self, kernel_s: float, rank: int) -> None:
        """Once, before the process group is made. kernel_s: what an operator takes."""

    def spin(self, seconds: float) -> None:
        """Enqueues a kernel that takes so long."""

    def set_slowness(self, factor: float) -> None:
        """Makes kernels that are enqueued from now on take so many times as long."""

    def paced(self, kernel_s: float | None) -> AbstractContextManager[None]:
        """For a loop in which the host's code takes the time: with kernels so short. None: no such loop."""

    def work(self, x: Tensor) -> Tensor:
        """After a module: x, once the module has taken its time, forwards and backwards."""


class Spins(autograd.Function):
    """The identity, in whose forward and backward passes a kernel takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spin: Callable[[float], None], forward_s: float, backward_s: float) -> Tensor:
        ctx.spin, ctx.seconds = spin, backward_s
        if forward_s:
            spin(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.spin(ctx.seconds)
        return gradients[0], None, None, None


class AsyncDevice:
    """Streams that are threads, see tests/device."""

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
        # Kernels that compute would take the processors from the hosts, which those of a GPU do not.
        self._device.set_kernel_time(self._kernel_s if kernel_s is None else kernel_s)
        self._device.set_computing(kernel_s is None)
        yield
        self._device.set_kernel_time(self._kernel_s)
        self._device.set_computing(True)

    def work(self, x: Tensor) -> Tensor:
        return x


class AsyncModules(AsyncDevice):
    """The same, with short operators and a spin for each module, as on CUDA: it shows what is planted there."""

    slowness = 2.0

    def load(self, kernel_s: float, rank: int) -> None:
        super().load(kernel_s / 10, rank)
        self._module_s = OPERATORS * kernel_s

    def work(self, x: Tensor) -> Tensor:
        made: Tensor = Spins.apply(x, self.spin, self._module_s, self._module_s)
        return made


class CudaDevice:
    """One GPU, on which all ranks are: NCCL takes them for hosts that talk over sockets."""

    name, backend = "cuda", "nccl"
    slowness = 2.0  # beyond what the turns of two processes on one device hide

    def load(self, kernel_s: float, rank: int) -> None:
        from benchmarks.gpu_check.one_gpu import two_hosts

        os.environ.update(two_hosts(rank))
        import torch

        torch.cuda.set_device(0)
        from benchmarks.gpu_check.checks import Spin

        self._spin, self._factor, self._module_s = Spin(), 1.0, OPERATORS * kernel_s
        self.spin(0)  # compiles it

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
