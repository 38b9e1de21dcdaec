"""Record collectives by the hooks of torch's process groups, which exist from torch 2.14 on.

torch calls the hooks below the dispatcher, on the thread that issues the operation. This includes
operations that DDP's reducer, FSDP2 and compiled graphs issue from C++.

A group's hooks stay until the group is destroyed, and return at once outside of a watch. torch
keeps hooks in a table without a lock: removing a hook that another thread is about to call would
free the hook in use. The hooks are removed when the interpreter exits, because freeing them later
crashes the process.
"""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torchlens_perf.errors import guard
from torchlens_perf.hooks.collectives.python_recording import (
    Issued,
    PythonRecording,
    find_first_tensor,
)
from torchlens_perf.recorder import devices, torch_groups, torch_private
from torchlens_perf.recorder.patch import patched

# Ids of hooks are shared by all tools. torch's own flight recorder counts from 0x46524543.
_HOOK_ID = 0x746C7066
# Operations with one list of tensors, which are inputs and outputs.
_IN_PLACE = ("send", "broadcast", "allreduce", "allreduce_coalesced", "reduce")
_HOOKED = frozenset(_IN_PLACE) | {
    "recv", "recv_any_source", "allgather", "allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "gather", "gather_into_tensor", "scatter", "alltoall",
    "alltoall_base", "barrier",
}  # fmt: skip

_hooked_groups: dict[int, weakref.ref[Any]] = {}
"""Process groups by id. A class of a group may define `__eq__` without `__hash__`."""
_kinds: dict[int, _Kind] = {}
"""Kinds of operations by the value of torch's HookOpName."""


class _Kind(NamedTuple):
    operator: str
    in_place: bool
    is_ambiguous: bool
    """True if torch has one name for several operators."""


def are_available() -> bool:
    """Return True if this torch calls hooks for the collectives of this machine's devices."""
    import torch

    if not torch.distributed.is_available():
        return False
    from torch._C._distributed_c10d import ProcessGroup

    # Devices of other types, such as "xpu", have kernels of their own, which call no hooks.
    return hasattr(ProcessGroup, "register_pre_hook") and devices.find_accelerator() in (
        "",
        "cuda",
        torch_private.get_private_device_type(),
    )


def is_hooked(operator: str) -> bool:
    """Return True if torch calls hooks for this operator. operator: a name in the dispatcher."""
    return operator.startswith("c10d::") and operator.partition("::")[2].strip("_") in _HOOKED


@contextmanager
def attach_hooks(recording: PythonRecording) -> Iterator[None]:
    """Record operations of all groups, also of later ones, while the context is active."""
    torch_private.require(torch_private.GROUP_REGISTRATION)
    import torch
    from torch.distributed import distributed_c10d

    members: Any = torch._C._distributed_c10d.HookOpName.__members__
    ambiguous = {"gather", "recv"}
    if "ALLGATHER_BASE" not in members:  # torch 2.14
        ambiguous |= {"allreduce", "allgather", "reduce_scatter", "alltoall"}
    for member, found in members.items():
        name = member.lower()
        _kinds[found.value] = _Kind(f"c10d::{name}", name in _IN_PLACE, name in ambiguous)

    register = distributed_c10d._register_process_group

    def register_and_hook(name: str, group: Any) -> None:
        register(name, group)
        _hook_group(group)

    with patched(distributed_c10d, "_register_process_group", register_and_hook):
        for group in list(distributed_c10d._world.pg_map):
            _hook_group(group)
        _GroupHooks.recording = recording
        try:
            yield
        finally:
            _GroupHooks.recording = None


@guard("attaching to a process group")
def _hook_group(group: Any) -> None:
    if not _hooked_groups:
        atexit.unregister(_remove_hooks)
        atexit.register(_remove_hooks)
    if id(group) not in _hooked_groups:
        hooks = _GroupHooks(group.group_name)
        group.register_post_hook(_HOOK_ID, hooks.after_issue)
        group.register_pre_hook(_HOOK_ID, hooks.before_issue)
        _hooked_groups[id(group)] = weakref.ref(
            group, functools.partial(_hooked_groups.pop, id(group))
        )


def _remove_hooks() -> None:
    for reference in list(_hooked_groups.values()):
        group = reference()
        if group is not None:
            group.unregister_pre_hook(_HOOK_ID)
            group.unregister_post_hook(_HOOK_ID)
    _hooked_groups.clear()


class _GroupHooks:
    """The two hooks of one process group. They must not refer to the group, which owns them."""

    recording: PythonRecording | None = None
    """The recording of the current watch."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._barrier_device = ""
        self._in_progress: dict[int, tuple[PythonRecording, Issued]] = {}
        """The operation that each thread is issuing. Each access is atomic under the GIL."""

    @guard("collective hook")
    def before_issue(self, arguments: Any) -> None:
        recording = self.recording
        if recording is None:
            return
        thread = threading.get_ident()
        unfinished = self._in_progress.pop(thread, None)
        if unfinished is not None:
            # torch calls no hook after an operation that has raised.
            unfinished[0].end_call(unfinished[1], raised=True)
        operator, in_place, is_ambiguous = _kinds[arguments.name.value]
        payload = arguments.input_tensors if in_place else arguments.output_tensors
        root = arguments.root
        if is_ambiguous:
            operator = _tell_operator(operator, len(arguments.input_tensors), len(payload), root)
        issued = recording.issue(
            operator,
            self._group,
            payload,
            self._find_device(arguments, payload),
            root,
            is_async=arguments.async_op,
        )
        if issued is not None:
            self._in_progress[thread] = recording, issued

    def _find_device(self, arguments: Any, payload: list[Any]) -> str:
        # In a gather, only the root has outputs. Barriers have no tensors.
        tensor = find_first_tensor(payload)
        if tensor is None:
            tensor = find_first_tensor(arguments.input_tensors)
        if tensor is not None:
            return "cpu" if tensor.is_cpu else str(tensor.device.type)
        if not self._barrier_device:
            self._barrier_device = torch_groups.get_barrier_device(self._group)
        return self._barrier_device

    @guard("collective hook")
    def after_issue(self, arguments: Any) -> None:
        found = self._in_progress.pop(threading.get_ident(), None)
        if found is not None:
            found[0].end_call(found[1])


def _tell_operator(operator: str, inputs: int, outputs: int, root: int) -> str:
    """Return which of the operators that share a name in torch has these numbers of tensors."""
    name = operator.removeprefix("c10d::")
    if name == "recv":
        return operator if root >= 0 else "c10d::recv_any_source"
    if name == "gather":
        return "c10d::gather_into_tensor" if outputs == 1 else operator
    if name == "allreduce":
        return operator if inputs == 1 else "c10d::allreduce_coalesced"
    if inputs == outputs == 1:
        return f"{operator}_base"
    if name == "allgather" and inputs > 1:
        return f"c10d::allgather_{'into_tensor_' * (inputs == outputs)}coalesced"
    if name == "reduce_scatter" and outputs > 1:
        return "c10d::reduce_scatter_tensor_coalesced"
    return operator
