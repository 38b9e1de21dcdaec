"""The device that a process uses, CUDA or other, with replaced functions of torch."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from torchlens_perf.errors import DeviceError
from torchlens_perf.recorder import device_abilities, devices
from torchlens_perf.recorder.devices import DeviceInUse, find_accelerator_in_use


class Accelerator:
    """A replacement for torch.accelerator with an additional device."""

    def __init__(self, reserved: dict[int, int] | None, current: int = 0) -> None:
        """`reserved` has the bytes by device. With None the allocator has no statistics."""
        self.reserved, self.current, self.initialized = reserved, current, True
        self.asked: list[str] = []

    def memory_reserved(self, index: int) -> int:
        self.asked.append("memory_reserved")
        if self.reserved is None:
            raise RuntimeError("device allocator is not a DeviceAllocator")
        return self.reserved[index]

    def device_count(self) -> int:
        return 2

    def current_device_index(self) -> int:
        self.asked.append("current_device_index")
        return self.current


def use(monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator) -> None:
    monkeypatch.setattr(torch, "accelerator", accelerator)
    module = types.SimpleNamespace(is_initialized=lambda: accelerator.initialized)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)


def test_only_device_with_memory_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device and a small accidental allocation do not count.

    With several devices, none is timed.
    """
    accelerator = Accelerator({0: 1, 1: 1 << 30})
    use(monkeypatch, accelerator)
    assert find_accelerator_in_use("npu", computes_there=True) == DeviceInUse("npu", 1)
    accelerator.reserved = {0: 0, 1: 0}
    assert find_accelerator_in_use("npu", computes_there=False) is None
    accelerator.reserved = {0: 5, 1: 5}
    with pytest.raises(DeviceError, match="2 devices"):
        find_accelerator_in_use("npu", computes_there=True)


def test_current_device_is_in_use_if_the_allocator_has_no_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A watched model or a process group must use a device of this type."""
    use(monkeypatch, Accelerator(None, current=1))
    assert find_accelerator_in_use("npu", computes_there=False) is None
    assert find_accelerator_in_use("npu", computes_there=True) == DeviceInUse("npu", 1)


def test_device_is_not_queried_before_it_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query could initialize the device, and a later fork would fail."""
    accelerator = Accelerator({0: 1, 1: 1})
    accelerator.initialized = False
    use(monkeypatch, accelerator)
    assert find_accelerator_in_use("npu", computes_there=True) is None
    assert accelerator.asked == []


@pytest.mark.parametrize(
    ("found", "sees", "kind"),
    [(None, False, ""), ("cuda", False, ""), ("cuda", True, "cuda"), ("xpu", False, "xpu")],
)
def test_cuda_build_without_a_gpu_has_no_device(
    monkeypatch: pytest.MonkeyPatch, found: str | None, sees: bool, kind: str
) -> None:
    current = None if found is None else types.SimpleNamespace(type=found)
    monkeypatch.setattr(
        torch, "accelerator", types.SimpleNamespace(current_accelerator=lambda: current)
    )
    monkeypatch.setattr(devices, "has_cuda_devices", lambda: sees)
    assert devices.find_accelerator() == kind


def test_device_without_timed_events_gives_its_error_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message is torch's own, and no exception is raised."""

    def no_events(*given: Any, **settings: Any) -> Any:
        raise RuntimeError("Backend doesn't support events\nwith a stack")

    monkeypatch.setattr(torch, "Event", no_events)
    for ability in device_abilities.ABILITIES:
        found = device_abilities.find_ability_problem(ability, torch.device("cpu"))
        assert found, ability.name
        assert "\n" not in found
    assert (
        device_abilities.find_ability_problem(
            device_abilities.Ability("yes", bool, ""), torch.device("cpu")
        )
        == ""
    )
    assert "wrong" in device_abilities.find_ability_problem(
        device_abilities.Ability("no", lambda device: False, ""), None
    )
