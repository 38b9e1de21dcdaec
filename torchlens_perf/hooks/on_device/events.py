"""Events of real devices, for clock.py: of any accelerator by torch's public names, and CUDA's by the cheapest way.

torch.Event and torch.Stream are the same for CUDA, ROCm, XPU and devices that are added to torch from outside
(PrivateUse1). What only CUDA has, captures and a driver to ask beside them, is in CudaEvents.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torchlens_perf.recorder import torch_private

if TYPE_CHECKING:
    from torchlens_perf.cuda.driver import Driver
    from torchlens_perf.recorder.devices import DeviceInUse

_MAX_STREAMS = 64  # that are kept; torch has 32 of each priority


def events_of(device: DeviceInUse) -> AcceleratorEvents:
    """The events of a device that has a context: none is made here. Raises what torch does, where it lacks them."""
    import torch

    if device.kind != "cuda":
        return AcceleratorEvents(device.kind, device.index)
    from torchlens_perf.cuda.driver import Driver

    return CudaEvents(device.index, Driver() if torch.version.cuda is not None else None)


class AcceleratorEvents:
    """torch.Event on the streams of torch.accelerator."""

    def __init__(self, kind: str, index: int) -> None:
        """kind: of the device, as torch has it: "xpu". index: its index."""
        import torch

        self.name = f"{kind} events"
        self._event = torch.Event
        self._stream: Callable[[int], Any] = torch.accelerator.current_stream
        self._device = torch.device(kind, index)
        self._index = index
        self._aside = self._idle_stream()

    def _idle_stream(self) -> Any:
        """For anchors: a stream that has nothing else to do, as a rule."""
        import torch

        return torch.Stream(device=self._device)

    def new(self) -> Any:
        """A timed event that has not been recorded. CUDA's resolution is about half a microsecond."""
        return self._event(self._device, enable_timing=True)

    def current(self) -> Hashable | None:
        """The calling thread's current stream; None while it is being captured into a graph."""
        stream: Hashable = self._stream(self._index)
        return stream

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def record_aside(self, event: Any) -> None:
        """Record it on a stream of our own, which has nothing else to do."""
        event.record(self._aside)

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return False

    def beside_captures(self) -> AbstractContextManager[None]:
        """Inside, questions to the device do not end what another thread captures."""
        return nullcontext()


class CudaEvents(AcceleratorEvents):
    """torch.cuda's own, with a current stream that is looked up by its handle; none during a capture. HIP's in ROCm."""

    def __init__(self, index: int, driver: Driver | None = None) -> None:
        """driver: of CUDA, not of HIP."""
        import torch

        super().__init__("cuda", index)
        self.name = "CUDA events"
        self._stream: Callable[[int], Any] = torch.cuda.current_stream
        self._timed = torch.cuda.Event
        self._driver = driver
        self._captures: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self._handle = torch_private.current_stream_handle()
        self._known: dict[int, Any] = {}  # streams by their handles: making one anew takes a microsecond

    def _idle_stream(self) -> Any:
        """One of torch's streams of the highest priority, so that anchors do not wait."""
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
