"""A watched process tells which GPUs it computes on, once, and asks no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.recording import Recording, recorded
from torchlens_perf.hooks import attach
from torchlens_perf.hooks.on_device.choice import GpuHook

GB = 1 << 30


class Devices:
    """What torch says of its devices; there is no GPU here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.initialized, self.capturing = True, False
        self.reserved = [0, 0, 0]
        self.asked = 0
        monkeypatch.setattr(torch.version, "cuda", None)  # a build for CUDA would have all its hooks ask these devices
        for name, answer in (
            ("is_initialized", lambda: self.initialized),
            ("is_current_stream_capturing", lambda: self.capturing),
            ("device_count", lambda: len(self.reserved)),
            ("memory_reserved", self._memory),
            ("get_device_properties", self._properties),
        ):
            monkeypatch.setattr(torch.cuda, name, answer)

    def _memory(self, index: int) -> int:
        self.asked += index == 0
        return self.reserved[index]

    def _properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=f"5d0ac6d5-0000-0000-0000-00000000000{index}", name="NVIDIA H200")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """Three, of which none is in use yet."""
    default_hooks = attach.default_hooks
    monkeypatch.setattr(attach, "default_hooks", lambda *args: [*default_hooks(*args), GpuHook()])
    return Devices(monkeypatch)


def steps(recording: Recording, count: int) -> None:
    """So many, by the user's word."""
    assert recording.watch is not None
    for _ in range(count):
        recording.watch.step()


def gpus(recording: Recording) -> list[Any]:
    """What the sidecar will read."""
    return [(gpu["uuid"], gpu["index"], gpu["name"]) for gpu in recording.metadata["gpus"]]


def test_told_once_there_is_one(devices: Devices, tmp_path: Path) -> None:
    """Looked for at the ends of the first, second, fourth ... step; with NVML's prefix; and then not again."""
    with recorded(tmp_path) as recording:
        steps(recording, 5)
        assert devices.asked == 3
        devices.reserved = [GB, 0, 10]  # what lies on the last is there by accident
        steps(recording, 3)
        asked = devices.asked
        steps(recording, 100)

    assert gpus(recording) == [("GPU-5d0ac6d5-0000-0000-0000-000000000000", 0, "NVIDIA H200")]
    assert asked == devices.asked == 4
    assert recording.notes == []


def test_several_devices(devices: Devices, tmp_path: Path) -> None:
    """A process that computes on two tells both."""
    devices.reserved = [GB, 0, GB]
    with recorded(tmp_path) as recording:
        steps(recording, 1)
    assert [index for _, index, _ in gpus(recording)] == [0, 2]


@pytest.mark.parametrize("reason", ["initialized", "capturing"])
def test_nothing_is_asked_too_early(devices: Devices, tmp_path: Path, reason: str) -> None:
    """Not before CUDA is initialized, and not while a graph is captured."""
    devices.reserved = [GB, 0, 0]
    devices.initialized, devices.capturing = reason != "initialized", reason == "capturing"
    with recorded(tmp_path) as recording:
        steps(recording, 2)
        assert devices.asked == 0
        devices.initialized, devices.capturing = True, False
        steps(recording, 2)
    assert len(gpus(recording)) == 1


def test_without_a_gpu_nothing_is_told(tmp_path: Path) -> None:
    """On a CPU the hook is not even there."""
    with recorded(tmp_path) as recording:
        steps(recording, 3)
    assert gpus(recording) == []
