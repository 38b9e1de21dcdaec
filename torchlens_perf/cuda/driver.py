"""The functions of the CUDA driver that we call ourselves, through ctypes.

torch has no public way to launch a kernel of ours onto a stream that is being captured, and CuPy's takes 5 us a launch.
torch's context is the current one on the thread that trains; nothing here makes another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from torchlens_perf.errors import DeviceError

LIBRARY = "libcuda.so.1"
NOT_READY = 600
_EVENT_DISABLE_TIMING = 2
_CAPTURE_NONE = 0
_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1

_INT, _UNSIGNED, _BYTES = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_HANDLE, _ADDRESS = ctypes.c_void_p, ctypes.c_uint64
_OUT = ctypes.c_void_p  # where the function writes a result
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

# Questions, which never wait: the GIL stays, for another thread that takes it may keep it for milliseconds. A launch or
# a record waits where the device's queue is full, and what it waits for may need the GIL.
_QUICK = {"cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuEventQuery"}


class Arguments:
    """A kernel's arguments, in the form that a launch takes them; made once, used for many launches."""

    def __init__(self, values: Sequence[np.generic]) -> None:
        """values: NumPy scalars of the parameters' types; addresses as uint64."""
        types: list[Any] = [np.ctypeslib.as_ctypes_type(value.dtype) for value in values]  # type: ignore[arg-type]
        self._values = [kind(value.item()) for kind, value in zip(types, values, strict=True)]
        self.pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in self._values))


class Driver:
    """The driver's library. Raises DeviceError where it is missing, or where a call fails.

    What is given a stream is enqueued there, and not waited for.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library, quick = ctypes.CDLL(library), ctypes.PyDLL(library)
        except OSError as error:
            raise DeviceError(f"the CUDA driver cannot be loaded: {error}") from None
        self._functions: dict[str, Any] = {}
        for name, signature in _SIGNATURES.items():
            function = getattr(quick if name in _QUICK else self._library, name)
            function.argtypes, function.restype = signature, _INT
            self._functions[name] = function
        self._launch = self._functions["cuLaunchKernel"]
        self._capturing = ctypes.c_int()
        self._capturing_at = ctypes.addressof(self._capturing)

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            raise DeviceError(f"{name} failed with CUDA error {status}")

    def allocate(self, size: int) -> int:
        """Device memory: its address. May wait for the device: for the beginning only, and never in a capture."""
        address = _ADDRESS()
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Gives it back. May wait for the device."""
        self._call("cuMemFree_v2", address)

    def allocate_host(self, size: int) -> int:
        """Page-locked memory of the host: its address. Copies to other memory would wait for the device."""
        address = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(address), size)
        return address.value or 0

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def copy_to_host(self, to: int, address: int, size: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", to, address, size, stream)

    def copy_to_device(self, address: int, values: np.ndarray[Any, Any], stream: int) -> None:
        """Copies an array; it may change as soon as this has returned."""
        self._call("cuMemcpyHtoDAsync_v2", address, values.ctypes.data, values.nbytes, stream)

    def clear(self, address: int, size: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, 0, size, stream)

    def copy_on_device(self, to: int, address: int, size: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync_v2", to, address, size, stream)

    def new_stream(self) -> int:
        """A stream, for the life of the process."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING)
        return stream.value or 0

    @contextmanager
    def own_stream(self) -> Iterator[int]:
        """A new stream, which is waited for at the end: for what must be there before any other stream goes on."""
        stream = self.new_stream()
        try:
            yield stream
            self._call("cuStreamSynchronize", stream)
        finally:
            self._call("cuStreamDestroy_v2", stream)

    @contextmanager
    def relaxed_captures(self) -> Iterator[None]:
        """Inside, this thread may ask the device while another one captures in the global mode: else the question is
        refused, and the capture lost."""
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def wait(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_capturing(self, stream: int) -> bool:
        """Whether what is enqueued on the stream goes into a graph."""
        self._call("cuStreamIsCapturing", stream, self._capturing_at)
        return self._capturing.value != _CAPTURE_NONE

    def new_event(self) -> int:
        """An event without a time, to wait for."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), _EVENT_DISABLE_TIMING)
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def happened(self, event: int) -> bool:
        """Whether the event's newest record has been reached. Not during a capture of this thread's."""
        with self.relaxed_captures():
            status = self._functions["cuEventQuery"](event)
        if status not in (0, NOT_READY):
            raise DeviceError(f"cuEventQuery failed with CUDA error {status}")
        return bool(status == 0)

    def launch(
        self, function: int, grid: int, threads: int, shared_bytes: int, stream: int, arguments: Arguments
    ) -> None:
        """Enqueues a kernel with a grid and blocks of one dimension."""
        status = self._launch(
            function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, arguments.pointers, None
        )  # fmt: skip
        if status:
            raise DeviceError(f"cuLaunchKernel failed with CUDA error {status}")
