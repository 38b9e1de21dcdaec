"""A replacement for torch's CUDA allocator on a machine without CUDA, with the structures of torch
2.13.

The dictionary keys are those of THCPModule_memoryStats and THCPModule_memorySnapshot in
torch/csrc/cuda/Module.cpp.

memory_stats() and _snapshot() in torch/cuda/memory.py document the keys.

Stack frames are real, because torch gathers and symbolizes them in the same way as for a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._profiler import gather_traceback, symbolize_tracebacks

from torchlens_perf.cuda import out_of_memory
from torchlens_perf.hooks import memory as hooks_memory
from torchlens_perf.recorder import torch_private

GB = 1 << 30
_ARRAYS = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_COUNTERS = (
    "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free", "max_split_size",
    "num_oom_rejections",
)  # fmt: skip


def frames() -> list[dict[str, Any]]:
    """Return the caller's Python stack in the form that torch stores with an allocated block."""
    (stack,) = symbolize_tracebacks([gather_traceback(python=True, script=True, cpp=False)])
    return list(stack[1:])


def block(
    size: int, state: str = "active_allocated", stack: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return a block without an address. segment() sets the address."""
    return {
        "address": 0,
        "size": size,
        "requested_size": size,
        "state": state,
        "frames": stack or [],
    }


def segment(
    blocks: list[dict[str, Any]], device: int = 0, address: int = 0x7F0000000000, **changed: Any
) -> dict[str, Any]:
    """Return a segment that consists of the given blocks."""
    at = address
    for each in blocks:
        each["address"], at = at, at + each["size"]
    live = [each["size"] for each in blocks if each["state"] != "inactive"]
    return {
        "device": device, "address": address, "total_size": at - address, "allocated_size": sum(live),
        "active_size": sum(live), "requested_size": sum(live), "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "registration_counter": -1, "frames": [], "blocks": blocks,
        **changed,
    }  # fmt: skip


def snapshot(
    segments: list[dict[str, Any]], traces: list[list[dict[str, Any]]] | None = None
) -> dict[str, Any]:
    """Return a snapshot. `traces` has one list of allocator events per device."""
    return {
        "segments": segments,
        "device_traces": traces or [],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": [],
    }


class FakeAllocator:
    """Replaces the functions of torch.cuda and torch._C that report the allocator of one device."""

    def __init__(self) -> None:
        self.initialized = True
        self.backend = "native"
        self.stats: dict[str, Any] = dict.fromkeys(_COUNTERS, 0)
        self.stats.update(
            {
                name: {pool: _stat() for pool in ("all", "small_pool", "large_pool")}
                for name in _ARRAYS
            }
        )
        self.stats.update(oversize_allocations=_stat(), oversize_segments=_stat())
        self.readings = 0
        self.fraction = 1.0
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.history: tuple[Any, ...] | None = None
        self.snapshots: list[bool] = []
        self.held = snapshot([])

    def uses(self, allocated: int, reserved: int, inactive: int = 0) -> None:
        """Set the numbers of bytes that the allocator reports from now on."""
        for name, value in (
            ("allocated", allocated),
            ("reserved", reserved),
            ("inactive_split", inactive),
        ):
            total = self.stats[f"{name}_bytes"]["all"]
            total["current"], total["peak"] = value, max(value, total["peak"])

    def runs_out(self, asked: int, free: int, limit: int = 80 * GB, device: int = 0) -> None:
        """Report an out-of-memory event as malloc() does before it raises OutOfMemoryError."""
        for observer in self.observers:
            observer(device, asked, limit, free)

    def memory_stats(self, device: int | None = None) -> dict[str, Any]:
        self.readings += 1
        return self.stats

    def memory_snapshot(self, pool: tuple[int, int, bool]) -> dict[str, Any]:
        self.snapshots.append(pool[2])
        return self.held

    def record_history(self, *settings: Any) -> None:
        self.history = settings if settings[0] is not None else None


class _Properties:
    total_memory = 80 * GB


def installed(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    """Replace torch's allocator, which a CPU build does not have."""
    fake = FakeAllocator()
    monkeypatch.setattr(hooks_memory, "has_cuda_devices", lambda: True)
    # Prevent other hooks from looking for a device, also with a CUDA build of torch.
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(out_of_memory, "relay", out_of_memory._ObserverRelay())
    for name, function in {
        "is_initialized": lambda: fake.initialized,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "memory_reserved": lambda device: fake.stats["reserved_bytes"]["all"]["current"],
        "memory_stats_as_nested_dict": fake.memory_stats,
        "get_device_properties": lambda device: _Properties,
        "get_per_process_memory_fraction": lambda device: fake.fraction,
        "get_allocator_backend": lambda: fake.backend,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    for name, function in {
        "_cuda_attach_out_of_memory_observer": fake.observers.append,
        "_cuda_memorySnapshot": fake.memory_snapshot,
        "_cuda_isHistoryEnabled": lambda: fake.history is not None,
        "_cuda_record_memory_history": fake.record_history,
    }.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    torch_private.is_usable.cache_clear()
    return fake


def _stat() -> dict[str, int]:
    return {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
