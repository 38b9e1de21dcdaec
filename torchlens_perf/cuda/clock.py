"""Create the clock of a device, which records timed events and reads their times later.

native/device_clock.c is the clock. Events of NVIDIA's and AMD's GPUs are recorded and read through
the driver. AcceleratorEvents are torch's events, for XPU and out-of-tree devices (PrivateUse1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import DeviceError
from torchlens_perf.interruption import ours
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.recorder import DeviceClock

if TYPE_CHECKING:
    from torchlens_perf.recorder.devices import DeviceInUse

CAPTURING = -2
"""Handle of a stream that a graph captures."""
_LIBRARIES = {"cu": ["libcuda.so.1"], "hip": [f"libamdhip64.so{end}" for end in (".7", ".6", "")]}
# In the order of EventDriver in native/device_clock.h.
_FUNCTIONS = {
    "cu": (
        "cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime",
        "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuCtxGetCurrent", "cuCtxSetCurrent",
    ),
    "hip": (
        "hipEventCreateWithFlags", "hipEventDestroy", "hipEventRecord", "hipEventQuery",
        "hipEventElapsedTime", "hipStreamIsCapturing", "hipThreadExchangeStreamCaptureMode",
    ),
}  # fmt: skip


def create_clock(device: DeviceInUse) -> Any:
    """Return the clock of a device, which must already have a context. It takes its first anchor.

    Raises DeviceError if the driver cannot be used, and torch's exception if the device has no
    events.
    """
    if device.kind != "cuda":
        events = AcceleratorEvents(device.kind, device.index)
        return create_clock_of_events(events, events.current_stream)
    import torch

    idle = torch.cuda.Stream(device.index, priority=-1)
    interface = "hip" if torch.version.cuda is None else "cu"
    for library in _LIBRARIES[interface]:
        try:
            # The clock uses the context that is current now.
            with torch.cuda.device(device.index):
                return create_driver_clock(
                    library,
                    _read_cuda_stream(),
                    device.index,
                    idle.cuda_stream,
                    interface=interface,
                )
        except ours(OSError) as error:
            problem = error
    raise DeviceError(f"the driver cannot be used: {problem}")


def create_driver_clock(
    library: str,
    read_stream: Callable[[int], int],
    index: int,
    idle_stream: int,
    now_ns: Callable[[], int] | None = None,
    *,
    interface: str = "cu",
    **limits: int,
) -> Any:
    """Return a clock whose events are the driver's.

    library: path of the driver. read_stream: returns the handle of the calling thread's current
    stream. idle_stream: handle of a stream that usually has no other work. Raises OSError.
    """
    return DeviceClock(
        library, _FUNCTIONS[interface], read_stream, index, idle_stream, now_ns, **limits
    )


def create_clock_of_events(
    events: Any, read_stream: Callable[[int], int], now_ns: Callable[[], int] | None = None
) -> Any:
    """Return a clock of events that are objects in Python.

    events: has create_event(), record(event, stream), and the handle `idle_stream`. An event has
    query() and elapsed_time(event) in ms.
    """
    return DeviceClock(events, (), read_stream, 0, events.idle_stream, now_ns)


def _read_cuda_stream() -> Callable[[int], int]:
    """Return the function that reads the handle of a CUDA device's current stream."""
    reader = torch_private.get_stream_handle_reader()
    if reader is not None:
        return reader
    import torch

    return lambda index: int(torch.cuda.current_stream(index).cuda_stream)


class AcceleratorEvents:
    """Creates and records torch.Event objects on the streams of torch.accelerator."""

    def __init__(self, kind: str, index: int) -> None:
        """kind: torch's name of the device type, such as "xpu". index: the device's index."""
        import torch

        self._event = torch.Event
        self._device = torch.device(kind, index)
        self._stream: Callable[[int], Any] = torch.accelerator.current_stream
        self._idle = torch.Stream(device=self._device)
        self.idle_stream = int(self._idle.stream_id)

    def current_stream(self, _: int) -> int:
        return int(self._stream(self._device.index).stream_id)

    def create_event(self) -> Any:
        return self._event(self._device, enable_timing=True)

    def record(self, event: Any, stream: int) -> None:
        """Record an event on the idle stream or on the current stream."""
        if stream == self.idle_stream:
            event.record(self._idle)
        else:
            event.record()
