"""A device without a GPU: the fake CUDA driver, and methods with which tests control the driver."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.device.shim_kernels import COMPILER, HERE
from torchlens_perf.cuda.aggregate import WindowMerger
from torchlens_perf.cuda.clock import (
    CAPTURING,
    create_clock_of_events,
    create_driver_clock,
)
from torchlens_perf.cuda.driver import CudaDriver, KernelArguments
from torchlens_perf.cuda.stamps import DeviceRing
from torchlens_perf.errors import DeviceError

_MORE = {
    "cuModuleLoadData": [ctypes.c_void_p, ctypes.c_void_p],
    "cuModuleGetFunction": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p],
    "cuStreamCreate": [ctypes.c_void_p, ctypes.c_uint],
    "cuStreamBeginCapture_v2": [ctypes.c_void_p, ctypes.c_int],
    "cuStreamEndCapture": [ctypes.c_void_p, ctypes.c_void_p],
    "cuGraphLaunch": [ctypes.c_void_p, ctypes.c_void_p],
    "cuEventCreate": [ctypes.c_void_p, ctypes.c_uint],
    "cuEventRecord": [ctypes.c_void_p, ctypes.c_void_p],
    "cuEventQuery": [ctypes.c_void_p],
    "cuEventElapsedTime": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p],
    "cuCtxSynchronize": [],
}


def compile_driver(target: Path) -> Path:
    """Compile the fake driver. Raises CalledProcessError."""
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    command = [str(COMPILER), *flags, "-o", str(target), str(HERE / "fake_driver.cpp"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


class FakeDevice:
    """A fake device. Each loaded library has its own clock, streams and counters."""

    def __init__(self, library: Path, kernels: Path) -> None:
        """Load the fake driver.

        `library` is a copy of the file from compile_driver(). `kernels` is the file from
        compile_kernels().
        """
        os.environ["FAKE_DRIVER_KERNELS"] = str(kernels)
        self.path = str(library)
        self.driver = CudaDriver(self.path)
        self._library = ctypes.CDLL(str(library))
        for name, types in _MORE.items():
            getattr(self._library, name).argtypes = types
        for name in ("fake_now_ns", "fake_synchronizations", "fake_device_bytes", "fake_calls"):
            getattr(self._library, name).restype = ctypes.c_uint64
        self._library.fake_advance.argtypes = [ctypes.c_uint64]
        self._library.fake_set_drift.argtypes = [ctypes.c_double]
        self._library.fake_fail.argtypes = [ctypes.c_char_p]
        self._library.fake_calls.argtypes = [ctypes.c_char_p]
        self._module = self.call_for_handle("cuModuleLoadData", None)

    def call_for_handle(self, name: str, *arguments: Any) -> int:
        """Call a function that writes a handle to its first parameter, and return the handle."""
        handle = ctypes.c_void_p()
        assert getattr(self._library, name)(ctypes.byref(handle), *arguments) == 0, name
        return handle.value or 0

    def functions(self, *names: str) -> dict[str, int]:
        """Return the handles of the kernels by name."""
        return {
            name: self.call_for_handle(
                "cuModuleGetFunction", ctypes.c_void_p(self._module), name.encode()
            )
            for name in names
        }

    def new_stream(self) -> int:
        """Return a new stream. The default stream is 0."""
        return self.call_for_handle("cuStreamCreate", 0)

    def advance(self, duration_ns: int) -> None:
        """Advance the clocks of the host and the device."""
        self._library.fake_advance(duration_ns)

    def set_drift(self, gained: float) -> None:
        """Set how many seconds the device's clock gains on the host's clock each second."""
        self._library.fake_set_drift(gained)

    def fail(self, function: str) -> None:
        """Let a driver function fail; none for ""."""
        self._library.fake_fail(function.encode())

    @property
    def context(self) -> int:
        """The driver's current context; 1 is the device's."""
        current = ctypes.c_void_p()
        self._library.cuCtxGetCurrent(ctypes.byref(current))
        return current.value or 0

    @context.setter
    def context(self, context: int) -> None:
        self._library.cuCtxSetCurrent(ctypes.c_void_p(context))

    def slow_records(self, duration_us: int) -> None:
        """Let each record of an event take this long, as with a full queue."""
        self._library.fake_slow_records(duration_us)

    def now_ns(self) -> int:
        """Return the current time, which is equal on the host and the device."""
        return int(self._library.fake_now_ns())

    @property
    def synchronizations(self) -> int:
        """Return the number of waits for the device."""
        return int(self._library.fake_synchronizations())

    @property
    def live_bytes(self) -> int:
        """Return the bytes of allocated device memory."""
        return int(self._library.fake_device_bytes())

    def calls(self, name: str) -> int:
        """Return the number of calls of a driver function."""
        return int(self._library.fake_calls(name.encode()))

    def synchronize(self) -> None:
        """Wait for the device, as a user's loss.item() does."""
        self._library.cuCtxSynchronize()

    def spin(self, duration_ns: int, stream: int = 0) -> None:
        """Enqueue work of the given duration."""
        function = self.functions("spin")["spin"]
        self.driver.launch_kernel(
            function, 1, 32, 0, stream, KernelArguments([np.uint64(duration_ns)])
        )

    def begin_capture(self, stream: int) -> None:
        """Start to record the stream's work as a graph."""
        assert self._library.cuStreamBeginCapture_v2(stream, 0) == 0

    def end_capture(self, stream: int) -> int:
        """End the recording of the stream's work, and return the graph."""
        graph = ctypes.c_void_p()
        assert self._library.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
        return graph.value or 0

    def replay(self, graph: int, stream: int = 0) -> None:
        """Enqueue the graph."""
        assert self._library.cuGraphLaunch(graph, stream) == 0


class FakeEvent:
    """Replaces torch.cuda.Event(enable_timing=True) on the fake driver."""

    def __init__(self, device: FakeDevice) -> None:
        self._library = device._library
        self._handle = device.call_for_handle("cuEventCreate", 0)

    def record(self, stream: int = 0) -> None:
        """Enqueue the event."""
        assert self._library.cuEventRecord(self._handle, stream) == 0

    def query(self) -> bool:
        """Return True if the device has reached the event.

        Raises RuntimeError during a capture, as torch does.
        """
        status = self._library.cuEventQuery(self._handle)
        if status not in (0, 600):
            raise RuntimeError(f"CUDA error {status}")
        return bool(status == 0)

    def elapsed_time(self, later: FakeEvent) -> float:
        """Return the milliseconds until a later event.

        Raises RuntimeError if the device has not reached both events.
        """
        milliseconds = ctypes.c_float()
        status = self._library.cuEventElapsedTime(
            ctypes.byref(milliseconds), self._handle, later._handle
        )
        if status:
            raise RuntimeError(f"CUDA error {status}")
        return milliseconds.value


class FakeStreams:
    """A current stream that tests change, and a separate stream."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.stream = 0
        self.idle_stream = device.new_stream()

    def create_clock(self, **limits: int) -> Any:
        """Return a clock that records events through the fake driver."""
        return create_driver_clock(
            self.device.path, lambda _: self.stream, 0, self.idle_stream, self.now_ns, **limits
        )

    def create_clock_of_events(self) -> Any:
        """Return a clock of events that are objects in Python."""
        return create_clock_of_events(self, self._read_stream, self.now_ns)

    def _read_stream(self, _: int) -> int:
        return CAPTURING if self.device.driver.is_capturing(self.stream) else self.stream

    def create_event(self) -> FakeEvent:
        return FakeEvent(self.device)

    def record(self, event: FakeEvent, stream: int) -> None:
        event.record(stream)

    def now_ns(self) -> int:
        """Return the time of the host's clock, which advances by 200 ns with each reading."""
        self.device.advance(200)
        return self.device.now_ns()


class FakeTorchDevice:
    """Replaces cuda_device.CudaDevice."""

    def __init__(self, device: FakeDevice, slots: int = 4, places: int = 64) -> None:
        self.device, self.current_stream, self.slots, self.places = device, 0, slots, places
        self.index = 0
        self.aside_stream = 0
        # True if torch has allocated memory on the device.
        self.used = True
        self.made: DeviceRing | None = None
        self.missing = ""

    def stream_handle(self) -> int:
        return self.current_stream

    def current_index(self) -> int:
        return self.index

    def is_capturing(self) -> bool:
        return self.device.driver.is_capturing(self.current_stream)

    def is_in_use(self) -> bool:
        return self.used

    def get_or_create_ring(self) -> DeviceRing:
        if self.missing:
            raise DeviceError(self.missing)
        if self.made is None:
            functions = self.device.functions("stamp", "reduce_window")
            self.made = DeviceRing(self.device.driver, functions, self.slots, self.places)
        return self.made

    def earlier_ring(self) -> DeviceRing | None:
        return self.made

    def now_ns(self) -> int:
        """Return the time of the host's clock, which advances with each reading."""
        self.device.advance(1000)
        return self.device.now_ns()

    def create_process_group(self) -> Any:
        """Create a gloo group, which can reduce the device's memory because that is host memory."""
        return dist.new_group()

    def create_merger(self, ring: DeviceRing, group: Any) -> WindowMerger:
        functions = self.device.functions("merged_quantiles", "rank_scores", "reduce_window")
        self.aside_stream = self.aside_stream or self.device.driver.create_stream()
        merging = WindowMerger(self, self.device.driver, functions, ring, group)
        reduce = merging._steps.enqueue_reduction

        def reduce_at_once(*given: Any) -> bool:
            """Finish the device's work before the reduction, because torch on the CPU does not wait
            for the fake device's streams.
            """
            reduced = reduce(*given)
            self.device.advance(10_000_000_000)
            return reduced

        merging._steps.enqueue_reduction = reduce_at_once
        return merging

    def all_ranks_agree(self, group: Any, *, able: bool) -> bool:
        flag = torch.tensor(int(able))
        dist.all_reduce(flag, dist.ReduceOp.MIN, group)
        return bool(flag)

    @contextmanager
    def merge_stream(self) -> Iterator[int]:
        """Finish enqueued work before the merge, because gloo does not wait for streams.

        During a capture, wait_stream() would make the other stream a part of the capture.
        """
        assert not self.is_capturing(), "forked from a capture, and never joined"
        self.device.advance(10_000_000_000)
        yield self.aside_stream

    def allocate_zeros(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64)

    def view_words(self, address: int, count: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_int64 * count).from_address(address), dtype=torch.int64)
