"""Records collectives: when they were issued, when they ended, and how long training waited.

A tap on the dispatcher receives every c10d operation and passes it on unchanged. This includes
operations that DDP's reducer, FSDP2, DTensor and compiled graphs issue from C++.

- The native tap (native/tap.cpp) also gets the end of each operation from the backend, without
  the GIL.
- The Python tap replaces it where it has not been built. It costs about 50 us per operation and
  records the end of operations that the caller waits for at once.

No Python callback runs on a backend's thread: that aborted 3 of 19 processes at exit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.hooks import python_tap
from torchlens_perf.hooks.collective_groups import Groups
from torchlens_perf.recorder import native_tap, torch_dispatcher, torch_private
from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.recorder import collective_marks, timed_wait
from torchlens_perf.recorder.torch_private import WAIT_TENSOR

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_NOT_COLLECTIVES = ("c10d::check_for_nan",)


def operators() -> list[str]:
    """Return the dispatcher names of c10d's collectives and point-to-point operations."""
    import torch

    names = torch._C._dispatch_get_all_op_names()
    return sorted(
        name for name in names if name.startswith("c10d::") and name not in _NOT_COLLECTIVES
    )


class CollectiveHook:
    """Hook that taps c10d's operators at BackendSelect, and times waits.

    Waits are `Work.wait` and `wait_tensor` of functional collectives.
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
        with ExitStack() as attached:
            attached.enter_context(self._tap(session))
            attached.enter_context(self._waits())
            yield

    @contextmanager
    def _tap(self, session: Session) -> Iterator[None]:
        torch_private.require("torch.ops.c10d at BackendSelect")
        groups = Groups(session)
        taps = [name for name in (*operators(), WAIT_TENSOR) if not _left_to_another(name, session)]
        native = native_tap.load()
        if native is not None:
            waits = [name for name in taps if name == WAIT_TENSOR]
            native.attach(
                collective_marks(),
                [name for name in taps if name != WAIT_TENSOR],
                waits,
                groups.describe_native,
            )
            try:
                yield
            finally:
                native.detach()
            return
        if session.identity.has_other_ranks:
            with guard("naming the native tap that is missing"):
                # The sidecar builds the missing tap for the next run, and the report says so.
                session.publish(missing_tap=native_tap.file_name())
        with python_tap.attached(taps, groups, session):
            yield

    @contextmanager
    def _waits(self) -> Iterator[None]:
        torch_private.require("torch._C._distributed_c10d.Work.wait")
        from torch._C._distributed_c10d import Work

        with patched(Work, "wait", torch_private.break_in_compiled_code(timed_wait(Work.wait))):
            yield


def another_has_tapped(operator: str) -> bool:
    """Return True if another tool's kernel is registered where the tap would be.

    Kernels of this package stay registered after a watch.
    """
    owner = torch_dispatcher.owner_of_tap(operator)
    return bool(owner) and not owner.startswith((native_tap.OWNER, python_tap.OWNER))


def _left_to_another(operator: str, session: Session) -> bool:
    if another_has_tapped(operator):
        session.note(f"{operator} is not recorded: another tool has registered a kernel for it")
        return True
    return False
