"""Tests that a watched process publishes the GPUs on which it computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.recording import Recording, recorded
from torchlens_perf.hooks import attach
from torchlens_perf.hooks.device_hooks import GpuIdentityHook

pytestmark = pytest.mark.usefixtures("each_step_is_due")

GB = 1 << 30


class Devices:
    """Replacements for torch's functions on devices, as the machine has no GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.initialized, self.capturing = True, False
        self.reserved = [0, 0, 0]
        self.asked = 0
        # With a CUDA build of torch, all other hooks would also query these devices.
        monkeypatch.setattr(torch.version, "cuda", None)
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
        return SimpleNamespace(
            uuid=f"5d0ac6d5-0000-0000-0000-00000000000{index}", name="NVIDIA H200"
        )


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """Replace torch's devices with three unused ones."""
    default_hooks = attach.create_hooks
    monkeypatch.setattr(
        attach, "create_hooks", lambda *args: [*default_hooks(*args), GpuIdentityHook()]
    )
    return Devices(monkeypatch)


def steps(recording: Recording, count: int) -> None:
    """End some steps manually."""
    assert recording.watch is not None
    for _ in range(count):
        recording.watch.step()


def gpus(recording: Recording) -> list[Any]:
    """Return the published GPUs as read by the sidecar."""
    return [(gpu["uuid"], gpu["index"], gpu["name"]) for gpu in recording.metadata["gpus"]]


def test_gpu_in_use_is_published_once_with_nvmls_uuid(devices: Devices, tmp_path: Path) -> None:
    """NVML's UUIDs begin with "GPU-"."""
    with recorded(tmp_path) as recording:
        steps(recording, 3)
        assert devices.asked == 3
        # A few reserved bytes on the last device do not count as use.
        devices.reserved = [GB, 0, 10]
        steps(recording, 1)
        asked = devices.asked
        steps(recording, 100)

    assert gpus(recording) == [("GPU-5d0ac6d5-0000-0000-0000-000000000000", 0, "NVIDIA H200")]
    assert asked == devices.asked == 4
    assert recording.notes == []


def test_all_gpus_used_by_a_process_are_published(devices: Devices, tmp_path: Path) -> None:
    devices.reserved = [GB, 0, GB]
    with recorded(tmp_path) as recording:
        steps(recording, 1)
    assert [index for _, index, _ in gpus(recording)] == [0, 2]


@pytest.mark.parametrize("reason", ["initialized", "capturing"])
def test_gpu_is_not_queried_before_cuda_is_initialized_or_in_a_capture(
    devices: Devices, tmp_path: Path, reason: str
) -> None:
    devices.reserved = [GB, 0, 0]
    devices.initialized, devices.capturing = reason != "initialized", reason == "capturing"
    with recorded(tmp_path) as recording:
        steps(recording, 2)
        assert devices.asked == 0
        devices.initialized, devices.capturing = True, False
        steps(recording, 2)
    assert len(gpus(recording)) == 1


def test_gpu_hook_is_not_attached_without_a_gpu(tmp_path: Path) -> None:
    with recorded(tmp_path) as recording:
        steps(recording, 3)
    assert gpus(recording) == []
