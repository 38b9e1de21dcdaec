"""Events of real devices for clock.py: a general class for accelerators, and a faster one for CUDA.

torch.Event and torch.Stream work for CUDA, ROCm, XPU and out-of-tree devices (PrivateUse1).
CudaEvents adds graph captures and driver calls that are allowed during captures.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torchlens_perf.recorder import torch_private

if TYPE_CHECKING:
    from torchlens_perf.cuda.driver import Driver
    from torchlens_perf.recorder.devices import DeviceInUse

# Streams kept by handle. torch has 32 of each priority.
_MAX_STREAMS = 64


def events_of(device: DeviceInUse) -> AcceleratorEvents:
    """Return the events of a device that already has a context.

    Raises torch's exception if the device has no events.
    """
    import torch

    if device.kind != "cuda":
        return AcceleratorEvents(device.kind, device.index)
    from torchlens_perf.cuda.driver import Driver

    return CudaEvents(device.index, Driver() if torch.version.cuda is not None else None)


class AcceleratorEvents:
    """torch.Event on the streams of torch.accelerator."""

    def __init__(self, kind: str, index: int) -> None:
        """kind: torch's name of the device type, such as "xpu". index: the device's index."""
        import torch

        self.name = f"{kind} events"
        self._event = torch.Event
        self._stream: Callable[[int], Any] = torch.accelerator.current_stream
        self._device = torch.device(kind, index)
        self._index = index
        self._aside = self._idle_stream()

    def _idle_stream(self) -> Any:
        """Return a stream for anchors that usually has no other work."""
        import torch

        return torch.Stream(device=self._device)

    def new(self) -> Any:
        """Return a new timed event. The resolution in CUDA is about half a microsecond."""
        return self._event(self._device, enable_timing=True)

    def current(self) -> Hashable | None:
        """Return the calling thread's current stream, or None while it is captured into a graph."""
        stream: Hashable = self._stream(self._index)
        return stream

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def record_aside(self, event: Any) -> None:
        """Record an event on a separate stream, which usually has no other work."""
        event.record(self._aside)

    def capturing(self) -> bool:
        """Return True if the current stream is being captured into a graph."""
        return False

    def beside_captures(self) -> AbstractContextManager[None]:
        """Return a context in which device queries do not invalidate another thread's capture."""
        return nullcontext()


class CudaEvents(AcceleratorEvents):
    """Events of torch.cuda (HIP events with ROCm). Streams are looked up by their handles."""

    def __init__(self, index: int, driver: Driver | None = None) -> None:
        """driver: the CUDA driver, or None with HIP."""
        import torch

        super().__init__("cuda", index)
        self.name = "CUDA events"
        self._stream: Callable[[int], Any] = torch.cuda.current_stream
        self._timed = torch.cuda.Event
        self._driver = driver
        self._captures: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self._handle = torch_private.current_stream_handle()
        # Streams by handle, because constructing a stream object takes a microsecond.
        self._known: dict[int, Any] = {}

    def _idle_stream(self) -> Any:
        """Return a stream of the highest priority, so that anchors do not wait for other work."""
        import torch

        return torch.cuda.Stream(self._index, priority=-1)

    def new(self) -> Any:
        return self._timed(enable_timing=True)

    def current(self) -> Hashable | None:
        if self._captures():
            return None
        if self._handle is None:
            return super().current()
        handle = self._handle(self._index)
        stream: Hashable = self._known.get(handle)
        if stream is None:
            if len(self._known) >= _MAX_STREAMS:
                self._known.clear()
            stream = self._known[handle] = super().current()
        return stream

    def capturing(self) -> bool:
        return bool(self._captures())

    def beside_captures(self) -> AbstractContextManager[None]:
        return nullcontext() if self._driver is None else self._driver.relaxed_captures()
