"""Process groups of torch.distributed, by private names: who is in one, and what carries it."""

from __future__ import annotations

from typing import Any


def members_of_group(name: str) -> tuple[list[int], str]:
    """The global ranks of a process group, and its description: "mesh_tp" for a DeviceMesh's dimension "tp"."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import _resolve_process_group

    group = _resolve_process_group(name)
    return dist.get_process_group_ranks(group), group.group_desc


def backend_of_group(name: str, device: str) -> str:
    """The name of a group's backend for tensors on that kind of device: "gloo"; "" if it has none.

    A group may have several, "cpu:gloo,cuda:nccl"; its own name is that of its default one, or "undefined".
    """
    import torch
    from torch._C._distributed_c10d import _resolve_process_group

    group = _resolve_process_group(name)
    try:
        return str(group._get_backend(torch.device(device)).name())
    except RuntimeError:
        return ""


def sequence_of_group(group: Any) -> int:
    """How many operations the backend says it has issued on a group; -1 if it does not count."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return -1
