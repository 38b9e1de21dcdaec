"""Which device is in use, also where it is none of CUDA's: on stand-ins for torch's functions."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from torchlens_perf.errors import DeviceError
from torchlens_perf.recorder import device_abilities, devices
from torchlens_perf.recorder.devices import DeviceInUse, accelerator_in_use


class Accelerator:
    """What torch tells of a device that was added to it."""

    def __init__(self, reserved: dict[int, int] | None, current: int = 0) -> None:
        """reserved: by device; None: its allocator keeps no numbers."""
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


def test_where_memory_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for CUDA: not the current device; little by accident does not count; several are not timed."""
    accelerator = Accelerator({0: 1, 1: 1 << 30})
    use(monkeypatch, accelerator)
    assert accelerator_in_use("npu", computes_there=True) == DeviceInUse("npu", 1)
    accelerator.reserved = {0: 0, 1: 0}
    assert accelerator_in_use("npu", computes_there=False) is None
    accelerator.reserved = {0: 5, 1: 5}
    with pytest.raises(DeviceError, match="2 devices"):
        accelerator_in_use("npu", computes_there=True)


def test_an_allocator_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device, once something watched is on one."""
    use(monkeypatch, Accelerator(None, current=1))
    assert accelerator_in_use("npu", computes_there=False) is None
    assert accelerator_in_use("npu", computes_there=True) == DeviceInUse("npu", 1)


def test_nothing_is_asked_before_it_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """That could initialize it, which poisons a later fork."""
    accelerator = Accelerator({0: 1, 1: 1})
    accelerator.initialized = False
    use(monkeypatch, accelerator)
    assert accelerator_in_use("npu", computes_there=True) is None
    assert accelerator.asked == []


@pytest.mark.parametrize(
    ("found", "sees", "kind"), [(None, False, ""), ("cuda", False, ""), ("cuda", True, "cuda"), ("xpu", False, "xpu")]
)
def test_kind(monkeypatch: pytest.MonkeyPatch, found: str | None, sees: bool, kind: str) -> None:
    """A CUDA build without a GPU has none."""
    current = None if found is None else types.SimpleNamespace(type=found)
    monkeypatch.setattr(torch, "accelerator", types.SimpleNamespace(current_accelerator=lambda: current))
    monkeypatch.setattr(devices, "has_devices", lambda: sees)
    assert devices.accelerator() == kind


def test_abilities_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without timed events says so in its own words; nothing is raised."""

    def no_events(*given: Any, **settings: Any) -> Any:
        raise RuntimeError("Backend doesn't support events\nwith a stack")

    monkeypatch.setattr(torch, "Event", no_events)
    for ability in device_abilities.ABILITIES:
        found = device_abilities.problem(ability, torch.device("cpu"))
        assert found, ability.name
        assert "\n" not in found
    assert device_abilities.problem(device_abilities.Ability("yes", bool, ""), torch.device("cpu")) == ""
    assert "wrong" in device_abilities.problem(device_abilities.Ability("no", lambda device: False, ""), None)
