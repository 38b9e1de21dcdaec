"""Call the CUDA driver through ctypes.

torch has no public API to launch a custom kernel on a stream that is being captured, and a launch
by CuPy takes 5 us. All calls use torch's context, which is current on the training thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from torchlens_perf.errors import DeviceError
from torchlens_perf.interruption import ours

LIBRARY = "libcuda.so.1"
NOT_READY = 600
_EVENT_DISABLE_TIMING = 2
_CAPTURE_NONE = 0
_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1

_INT, _UNSIGNED, _BYTES = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_HANDLE, _ADDRESS = ctypes.c_void_p, ctypes.c_uint64
_OUT = ctypes.c_void_p  # Pointer to the memory for a result.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemAlloc_v2": (_OUT, _BYTES),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemAllocHost_v2": (_OUT, _BYTES),
    "cuMemFreeHost": (_HANDLE,),
    "cuMemcpyDtoHAsync_v2": (_HANDLE, _ADDRESS, _BYTES, _HANDLE),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _HANDLE, _BYTES, _HANDLE),
    "cuMemsetD8Async": (_ADDRESS, ctypes.c_ubyte, _BYTES, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, _BYTES, _HANDLE),
    "cuStreamCreate": (_OUT, _UNSIGNED),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamIsCapturing": (_HANDLE, _OUT),
    "cuThreadExchangeStreamCaptureMode": (_OUT,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, _UNSIGNED),
    "cuEventCreate": (_OUT, _UNSIGNED),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventQuery": (_HANDLE,),
    "cuLaunchKernel": (_HANDLE, *(_UNSIGNED,) * 7, _HANDLE, _HANDLE, _HANDLE),
}

# Functions that never block, which are called with the GIL: another thread could keep a released
# GIL for milliseconds. Launches and records block while the device's queue is full. They must
# release the GIL, because the queued work may need it.
_NON_BLOCKING = {"cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuEventQuery"}


class KernelArguments:
    """A kernel's arguments in the form for cuLaunchKernel. They can be used for many launches."""

    def __init__(self, values: Sequence[np.generic]) -> None:
        """values: NumPy scalars of the parameters' types. Addresses are uint64."""
        types: list[Any] = [np.ctypeslib.as_ctypes_type(value.dtype) for value in values]  # type: ignore[arg-type]
        self._values = [kind(value.item()) for kind, value in zip(types, values, strict=True)]
        self.pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.addressof(value) for value in self._values)
        )


class CudaDriver:
    """The CUDA driver's library. Methods raise DeviceError if a call fails.

    Methods with a stream argument enqueue work on that stream and do not wait for it.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library, quick = ctypes.CDLL(library), ctypes.PyDLL(library)
        except ours(OSError) as error:
            raise DeviceError(f"the CUDA driver cannot be loaded: {error}") from None
        self._functions: dict[str, Any] = {}
        for name, signature in _SIGNATURES.items():
            function = getattr(quick if name in _NON_BLOCKING else self._library, name)
            function.argtypes, function.restype = signature, _INT
            self._functions[name] = function
        self._capturing = ctypes.c_int()
        self._capturing_at = ctypes.addressof(self._capturing)

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            raise DeviceError(f"{name} failed with CUDA error {status}")

    def _call_with_result(self, kind: type[Any], name: str, *arguments: Any) -> int:
        """Call a function whose first parameter receives its result, and return the result."""
        result = kind()
        self._call(name, ctypes.byref(result), *arguments)
        return int(result.value or 0)

    def allocate(self, size: int) -> int:
        """Allocate device memory and return its address.

        Used only during setup, because it may wait for the device. Not allowed during a capture.
        """
        return self._call_with_result(_ADDRESS, "cuMemAlloc_v2", size)

    def free(self, address: int) -> None:
        """Free device memory. This call may wait for the device."""
        self._call("cuMemFree_v2", address)

    def allocate_host(self, size: int) -> int:
        """Allocate page-locked host memory and return its address.

        A copy to other host memory would wait for the device.
        """
        return self._call_with_result(_HANDLE, "cuMemAllocHost_v2", size)

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def copy_to_host(self, to: int, address: int, size: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", to, address, size, stream)

    def copy_to_device(self, address: int, values: np.ndarray[Any, Any], stream: int) -> None:
        """Enqueue the copy of an array, which may be changed after the call."""
        self._call("cuMemcpyHtoDAsync_v2", address, values.ctypes.data, values.nbytes, stream)

    def clear_memory(self, address: int, size: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, 0, size, stream)

    def copy_on_device(self, to: int, address: int, size: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync_v2", to, address, size, stream)

    def create_stream(self) -> int:
        """Create a stream that exists until the process ends."""
        return self._call_with_result(_HANDLE, "cuStreamCreate", _STREAM_NON_BLOCKING)

    @contextmanager
    def temporary_stream(self) -> Iterator[int]:
        """Create a stream for the context and wait for its work at the end.

        Used for setup that must be complete before other streams continue.
        """
        stream = self.create_stream()
        try:
            yield stream
            self._call("cuStreamSynchronize", stream)
        finally:
            self._call("cuStreamDestroy_v2", stream)

    @contextmanager
    def allow_during_captures(self) -> Iterator[None]:
        """Allow calls on this thread while another thread captures a graph in global mode.

        Otherwise the call would fail and invalidate the capture.
        """
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def wait_for_event(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_capturing(self, stream: int) -> bool:
        """Return True if a graph captures work that is enqueued on the stream."""
        self._call("cuStreamIsCapturing", stream, self._capturing_at)
        return self._capturing.value != _CAPTURE_NONE

    def create_event(self) -> int:
        """Create an event without timing, for synchronization."""
        return self._call_with_result(_HANDLE, "cuEventCreate", _EVENT_DISABLE_TIMING)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def has_event_passed(self, event: int) -> bool:
        """Return True if the device has reached the last record of the event.

        Must not be called while this thread captures.
        """
        with self.allow_during_captures():
            status = self._functions["cuEventQuery"](event)
        if status not in (0, NOT_READY):
            raise DeviceError(f"cuEventQuery failed with CUDA error {status}")
        return bool(status == 0)

    def launch_kernel(
        self,
        function: int,
        grid: int,
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: KernelArguments,
    ) -> None:
        """Enqueue a kernel with a one-dimensional grid and one-dimensional blocks."""
        self._call(
            "cuLaunchKernel", function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, arguments.pointers, None
        )  # fmt: skip
