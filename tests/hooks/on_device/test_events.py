"""The current stream of CudaEvents, with replacements for torch.cuda's functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchlens_perf.hooks.on_device import events
from torchlens_perf.hooks.on_device.events import CudaEvents
from torchlens_perf.recorder import torch_private


class Cuda:
    """A current stream that tests can change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, handles: bool) -> None:
        """`handles` is True if torch returns a stream's handle."""
        self.handle, self.capturing, self.made = 0, False, 0
        monkeypatch.setattr(torch.cuda, "Stream", lambda index, priority: ("idle", index, priority))
        monkeypatch.setattr(
            torch.cuda, "Event", lambda *, enable_timing: SimpleNamespace(timing=enable_timing)
        )
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        get_handle = (lambda index: self.handle) if handles else None
        monkeypatch.setattr(torch_private, "get_stream_handle_reader", lambda: get_handle)

    def current_stream(self, index: int) -> Any:
        """Return a new object at each call."""
        assert index == 3
        self.made += 1
        return ("stream", self.handle)


@pytest.mark.parametrize("handles", [True, False])
def test_current_streams_are_equal_by_value_and_created_once_per_handle(
    monkeypatch: pytest.MonkeyPatch, handles: bool
) -> None:
    """Streams are compared by value, or by their handles if torch returns them."""
    cuda = Cuda(monkeypatch, handles=handles)
    own = CudaEvents(3)
    assert own.name == "CUDA events"
    assert own.create_event().timing
    first = own.current_stream()
    cuda.handle = 7
    other = own.current_stream()
    cuda.handle = 0
    assert first == own.current_stream() != other
    assert cuda.made == (2 if handles else 3)
    cuda.capturing = True
    assert own.current_stream() is None
    assert own.is_capturing()


def test_number_of_stored_streams_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may create any number of streams."""
    cuda = Cuda(monkeypatch, handles=True)
    own = CudaEvents(3)
    for cuda.handle in range(10 * events._MAX_STREAMS):
        assert own.current_stream() == ("stream", cuda.handle)
    assert len(own._known) <= events._MAX_STREAMS
