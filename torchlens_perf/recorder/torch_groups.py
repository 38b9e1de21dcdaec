"""Read members and backends of torch.distributed's process groups, by private names."""

from __future__ import annotations

from typing import Any

from torchlens_perf.interruption import ours


def get_group_members(name: str) -> tuple[list[int], str]:
    """Return the global ranks of a process group and its description: "mesh_tp" for dimension "tp"
    of a DeviceMesh.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import _resolve_process_group

    group = _resolve_process_group(name)
    return dist.get_process_group_ranks(group), group.group_desc


def get_group_backend(name: str, device: str) -> str:
    """Return the name of a group's backend for a device type, such as "gloo"; "" if it has no such
    backend.

    A group may have several backends, such as "cpu:gloo,cuda:nccl".
    """
    import torch
    from torch._C._distributed_c10d import _resolve_process_group

    group = _resolve_process_group(name)
    try:
        return str(group._get_backend(torch.device(device)).name())
    except ours(RuntimeError):
        return ""


def get_group_sequence_number(name: str) -> int:
    """Return the number of operations that a group's backend has issued, or -1 if it does not
    count.
    """
    from torch._C._distributed_c10d import _resolve_process_group

    group: Any = _resolve_process_group(name)
    try:
        return int(group._get_sequence_number_for_group())
    except ours(RuntimeError):
        return -1


def get_barrier_device(name: str) -> str:
    """Return the type of the device on which a group's barriers run, such as "cpu" or "cuda"."""
    from torch._C._distributed_c10d import _resolve_process_group

    types = [device.type for device in _resolve_process_group(name)._device_types]
    return "cpu" if "cpu" in types or not types else str(types[0])
