"""Common code of the check's parts: kernels made for the check, and times by the device's clock."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torchlens_perf.cuda import kernels
from torchlens_perf.cuda.driver import CudaDriver, KernelArguments
from torchlens_perf.cuda.stamps import DeviceRing

# Kernels of the check: work of a known duration that stores its real duration, and an empty kernel.
PLANTED = r"""
__device__ unsigned long long now_ns()
{
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
extern "C" __global__ void spin(unsigned long long duration_ns, unsigned long long *took_ns)
{
    unsigned long long start = now_ns(), now = start;
    while (now - start < duration_ns) {
        now = now_ns();
    }
    *took_ns = now - start;
}
extern "C" __global__ void read_clock(unsigned long long *times_ns, int count)
{
    for (int i = 0; i < count; i++) {
        times_ns[i] = now_ns();
    }
}
extern "C" __global__ void nothing(void) {}
"""


@functools.cache
def planted(name: str) -> Any:
    """Return a kernel of PLANTED, compiled by CuPy."""
    import cupy

    return cupy.RawModule(code=PLANTED, options=("--std=c++17",)).get_function(name)


@functools.cache
def driver() -> CudaDriver:
    """Return the CUDA driver with torch's context on the device."""
    torch.zeros(1, device="cuda")
    return CudaDriver()


def stream() -> int:
    """Return the current stream's handle."""
    return int(torch.cuda.current_stream().cuda_stream)


def launch(name: str, *values: np.generic) -> None:
    """Launch a kernel of PLANTED with one thread on the current stream, which may be captured."""
    driver().launch_kernel(
        int(planted(name).kernel.ptr), 1, 1, 0, stream(), KernelArguments(values)
    )


class Spin:
    """Work of a known duration. The device's clock measures each real duration."""

    def __init__(self, most: int = 4096) -> None:
        self._took = torch.zeros(most, dtype=torch.int64, device="cuda")
        self._count = 0

    def __call__(self, duration_ns: int) -> None:
        address = self._took.data_ptr() + 8 * self._count
        self._count = (self._count + 1) % len(self._took)
        launch("spin", np.uint64(duration_ns), np.uint64(address))

    def took_ns(self) -> np.ndarray[Any, Any]:
        """Wait for the device. Return the durations so far."""
        return self._took[: self._count].cpu().numpy()


def occupy(duration_ns: int = 20_000_000) -> None:
    """Keep the device busy, which lets work enqueued now run without a wait for the host."""
    Spin(1)(duration_ns)


def new_ring(slots: int = 64, places: int = 1024) -> DeviceRing:
    """Return a device ring whose kernels CuPy has compiled."""
    made = driver()
    return DeviceRing(made, kernels.load_kernels(torch.cuda.current_device()), slots, places)


def graph_us(function: Callable[[], object], calls: int = 20, rounds: int = 30) -> float:
    """Return the device time of one call in us, as the median over replays of a graph of `calls`
    calls.
    """
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        for _ in range(calls):
            function()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The host has launched the whole graph before the device begins it.
        occupy(300_000)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def bootstrap(values: Sequence[float], quantiles: Sequence[float] = (0.025, 0.975)) -> list[float]:
    """Return quantiles of the values' median from 4000 bootstrap samples."""
    draw = np.random.default_rng(1)
    samples = draw.choice(np.asarray(values), (4000, len(values)))
    return [float(value) for value in np.quantile(np.median(samples, axis=1), quantiles)]
