"""Events of real devices for clock.py: one class for all accelerators, and a faster one for CUDA.

torch.Event and torch.Stream work for CUDA, ROCm, XPU and out-of-tree devices (PrivateUse1).
CudaEvents also detects graph captures and makes driver calls that are allowed during captures.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torchlens_perf.recorder import torch_private

if TYPE_CHECKING:
    from torchlens_perf.cuda.driver import CudaDriver
    from torchlens_perf.recorder.devices import DeviceInUse

# Maximum number of cached stream objects. torch has 32 streams of each priority.
_MAX_STREAMS = 64


def create_events(device: DeviceInUse) -> AcceleratorEvents:
    """Return an object that creates and records events. The device must already have a context.

    Raises torch's exception if the device has no events.
    """
    import torch

    if device.kind != "cuda":
        return AcceleratorEvents(device.kind, device.index)
    from torchlens_perf.cuda.driver import CudaDriver

    return CudaEvents(device.index, CudaDriver() if torch.version.cuda is not None else None)


class AcceleratorEvents:
    """Creates and records torch.Event objects on the streams of torch.accelerator."""

    def __init__(self, kind: str, index: int) -> None:
        """kind: torch's name of the device type, such as "xpu". index: the device's index."""
        import torch

        self.name = f"{kind} events"
        self._event = torch.Event
        self._stream: Callable[[int], Any] = torch.accelerator.current_stream
        self._device = torch.device(kind, index)
        self._index = index
        self._aside = self._create_idle_stream()

    def _create_idle_stream(self) -> Any:
        """Return a stream for anchors that usually has no other work."""
        import torch

        return torch.Stream(device=self._device)

    def create_event(self) -> Any:
        """Return a new timed event. CUDA's resolution is about half a microsecond."""
        return self._event(self._device, enable_timing=True)

    def current_stream(self) -> Hashable | None:
        """Return the calling thread's current stream, or None while a graph captures it."""
        stream: Hashable = self._stream(self._index)
        return stream

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def record_on_idle_stream(self, event: Any) -> None:
        """Record an event on a separate stream, which usually has no other work."""
        event.record(self._aside)

    def is_capturing(self) -> bool:
        """Return True if the current stream is being captured into a graph."""
        return False

    def allow_during_captures(self) -> AbstractContextManager[None]:
        """Return a context in which device queries do not invalidate another thread's capture."""
        return nullcontext()


class CudaEvents(AcceleratorEvents):
    """Creates and records events of torch.cuda (HIP events with ROCm)."""

    def __init__(self, index: int, driver: CudaDriver | None = None) -> None:
        """driver: the CUDA driver, or None with HIP."""
        import torch

        super().__init__("cuda", index)
        self.name = "CUDA events"
        self._stream: Callable[[int], Any] = torch.cuda.current_stream
        self._timed = torch.cuda.Event
        self._driver = driver
        self._captures: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self._handle = torch_private.get_stream_handle_reader()
        # Stream objects by handle, because constructing one takes a microsecond.
        self._known: dict[int, Any] = {}

    def _create_idle_stream(self) -> Any:
        """Return a stream of the highest priority, on which events do not wait for other work."""
        import torch

        return torch.cuda.Stream(self._index, priority=-1)

    def create_event(self) -> Any:
        return self._timed(enable_timing=True)

    def current_stream(self) -> Hashable | None:
        if self._captures():
            return None
        if self._handle is None:
            return super().current_stream()
        handle = self._handle(self._index)
        stream: Hashable = self._known.get(handle)
        if stream is None:
            if len(self._known) >= _MAX_STREAMS:
                self._known.clear()
            stream = self._known[handle] = super().current_stream()
        return stream

    def is_capturing(self) -> bool:
        return bool(self._captures())

    def allow_during_captures(self) -> AbstractContextManager[None]:
        return nullcontext() if self._driver is None else self._driver.allow_during_captures()
