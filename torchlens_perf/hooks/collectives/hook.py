"""Record when collectives were issued and ended, and how long training waited for them.

Every c10d operation is recorded, including those that DDP's reducer, FSDP2, DTensor and compiled
graphs issue from C++. Decision 52 compares the ways:

- The native tap on the dispatcher (native/tap.cpp) also gets the end of each operation from the
  backend, without the GIL. The other ways record no end of an operation unless the caller waits
  for it immediately.
- Without the native tap, torch's own hooks are used, from torch 2.14 on.
- Otherwise the Python tap on the dispatcher is used, which costs about 50 us per operation.

No Python callback runs on a backend's thread: such a callback made 3 of 19 processes abort at their
exit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.hooks.collectives import process_group_hooks, python_tap
from torchlens_perf.hooks.collectives.groups import CollectiveGroups
from torchlens_perf.hooks.collectives.python_recording import PythonRecording
from torchlens_perf.recorder import native_tap, torch_dispatcher, torch_private
from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.recorder import collective_marks, timed_wait
from torchlens_perf.recorder.torch_private import WAIT_TENSOR

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_NOT_COLLECTIVES = ("c10d::check_for_nan",)


def list_collective_operators() -> list[str]:
    """Return the dispatcher names of c10d's collectives and point-to-point operations."""
    import torch

    return sorted(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("c10d::") and name not in _NOT_COLLECTIVES
    )


class CollectiveHook:
    """Hook that records c10d's operations, and times waits.

    The timed waits are `Work.wait` and the `wait_tensor` of functional collectives.
    """

    name = "collective"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        import torch
        import torch.distributed

        if not torch.distributed.is_available():
            yield
            return
        session.recorder.start_collectives(session.intern("wait"))
        with self._attach_tap(session):
            torch_private.require("torch._C._distributed_c10d.Work.wait")
            work = torch.distributed.Work
            timed = torch_private.break_graph_at(timed_wait(work.wait))
            with patched(work, "wait", timed):
                yield

    @contextmanager
    def _attach_tap(self, session: Session) -> Iterator[None]:
        torch_private.require("torch.ops.c10d at BackendSelect")
        groups = CollectiveGroups(session)
        native = native_tap.load_tap()
        hooked = native is None and process_group_hooks.are_available()
        taps = [
            name
            for name in (*list_collective_operators(), WAIT_TENSOR)
            if not (hooked and process_group_hooks.is_hooked(name))
            and not _is_left_to_another_tool(name, session)
        ]
        if native is not None:
            waits = [name for name in taps if name == WAIT_TENSOR]
            native.attach(
                collective_marks(),
                [name for name in taps if name != WAIT_TENSOR],
                waits,
                groups.describe_for_native_tap,
            )
            try:
                yield
            finally:
                native.detach()
            return
        if session.identity.has_other_ranks:
            with guard("describing the native tap that is missing"):
                session.facts.missing_tap = native_tap.describe_missing_tap()
                session.publish()
        recording = PythonRecording(groups, session)
        hooks = process_group_hooks.attach_hooks(recording) if hooked else nullcontext()
        with hooks, python_tap.attach_tap(taps, recording, session):
            yield


def is_tapped_by_another_tool(operator: str) -> bool:
    """Return True if another tool has registered a kernel at BackendSelect for this operator.

    This package's own kernels, which stay registered after a watch, do not count.
    """
    owner = torch_dispatcher.find_kernel_owner(operator)
    return bool(owner) and not owner.startswith((native_tap.OWNER, python_tap.OWNER))


def _is_left_to_another_tool(operator: str, session: Session) -> bool:
    if is_tapped_by_another_tool(operator):
        session.note(f"{operator} is not recorded: another tool has registered a kernel for it")
        return True
    return False
