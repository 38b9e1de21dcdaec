"""Collectives: what was issued, and how long the training thread was blocked for them.

A tap on the dispatcher sees every operation of c10d, also those that DDP's reducer, FSDP2, DTensor and compiled graphs
issue from C++; it sends them on unchanged. Blocked time is taken on the calling thread alone. There is no callback on a
backend's thread: a Python one aborted 3 of 19 processes at their exit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf import torch_private
from torchlens_perf.errors import guard
from torchlens_perf.hooks.patch import patched
from torchlens_perf.ring import Flag, Kind

if TYPE_CHECKING:
    from torchlens_perf.session import Session

_COLLECTIVE, _WAIT, _ASYNC = int(Kind.COLLECTIVE), int(Kind.WAIT), int(Flag.ASYNC)
_NOT_COLLECTIVES = ("c10d::check_for_nan",)
_BLOCKING = ("c10d::monitored_barrier_",)  # waits inside the operation; all others are waited for through their Work


def operators() -> list[str]:
    """The schemas that c10d's collectives and point-to-point operations go through."""
    import torch

    names = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in names if name.startswith("c10d::") and name not in _NOT_COLLECTIVES)


def payload_bytes(value: Any) -> int:
    """Bytes of the tensors in an operation's first argument."""
    if isinstance(value, (list, tuple)):
        return sum(payload_bytes(part) for part in value)
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0


class CollectiveHook:
    """Taps c10d's operators at BackendSelect, and times `Work.wait` and functional `wait_tensor`."""

    name = "collective"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        import torch
        import torch.distributed

        if not torch.distributed.is_available():
            yield
            return
        with ExitStack() as attached:
            attached.enter_context(self._tap(session))
            attached.enter_context(self._waits(session))
            yield

    @contextmanager
    def _tap(self, session: Session) -> Iterator[None]:
        torch_private.require("torch.ops.c10d at BackendSelect")
        import torch

        libraries = {name: torch.library.Library(name, "IMPL") for name in ("c10d", "_c10d_functional")}
        try:
            for operator in operators():
                self._put(libraries["c10d"], operator, _timed_operator(session, operator), session)
            wait = "_c10d_functional::wait_tensor"
            self._put(libraries["_c10d_functional"], wait, _timed_wait_tensor(session, wait), session)
            yield
        finally:
            for library in libraries.values():
                library._destroy()

    def _put(self, library: Any, operator: str, kernel: Callable[..., Any], session: Session) -> None:
        if torch_private.has_tap(operator):
            session.note(f"{operator} is tapped by another tool and was left to it: not recorded")
            return
        library.impl(operator.partition("::")[2], kernel, "BackendSelect", with_keyset=True)

    @contextmanager
    def _waits(self, session: Session) -> Iterator[None]:
        torch_private.require("torch._C._distributed_c10d.Work.wait")
        from torch._C._distributed_c10d import Work

        recorder, name_id, wait = session.recorder, session.intern("wait"), Work.wait

        def timed_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            start_ns = recorder.now_ns()
            recorder.begin(_WAIT, name_id)
            try:
                return wait(self, *args, **kwargs)
            finally:
                recorder.end(_WAIT, name_id)
                session.waited_ns += recorder.now_ns() - start_ns

        torch_private.break_in_compiled_code(timed_wait)
        with patched(Work, "wait", timed_wait):
            yield


def _overload(operator: str) -> Any:
    import torch

    namespace, _, name = operator.partition("::")
    return getattr(getattr(torch.ops, namespace), name).default


def _timed_operator(session: Session, operator: str) -> Callable[..., Any]:
    from torch._C._distributed_c10d import ProcessGroup

    recorder, overload, rest = session.recorder, _overload(operator), torch_private.rest_of_dispatch()
    arguments = [argument.name for argument in overload._schema.arguments]
    group_at = arguments.index("process_group")
    async_at = arguments.index("async_op") if "async_op" in arguments else None
    blocking = operator in _BLOCKING
    shown = operator.partition("::")[2].strip("_")
    name_ids: dict[str, int] = {}
    sequences: defaultdict[str, int] = session.collective_sequences

    @guard("collective tap")
    def record(args: tuple[Any, ...], start_ns: int, end_ns: int) -> None:
        group = ProcessGroup.unbox(args[group_at]).group_name
        if group not in name_ids:
            name_ids[group] = session.intern(f"{shown} group={group}")
        sequence = sequences[group]
        sequences[group] += 1
        is_async = async_at is None or len(args) <= async_at or bool(args[async_at])
        recorder.interval(
            _COLLECTIVE,
            name_ids[group],
            start_ns,
            end_ns - start_ns,
            _ASYNC if is_async else 0,
            payload_bytes(args[0]),
            sequence,
        )
        if blocking:
            recorder.interval(_WAIT, name_ids[group], start_ns, end_ns - start_ns)
            session.waited_ns += end_ns - start_ns

    def tap(keys: Any, *args: Any) -> Any:
        start_ns = recorder.now_ns()
        result = overload.redispatch(keys & rest, *args)
        record(args, start_ns, recorder.now_ns())
        return result

    return tap


def _timed_wait_tensor(session: Session, operator: str) -> Callable[..., Any]:
    recorder, overload, rest = session.recorder, _overload(operator), torch_private.rest_of_dispatch()
    name_id = session.intern("wait")
    tracing = torch_private.tracing_context()

    def tap(keys: Any, *args: Any) -> Any:
        if tracing() is not None:
            return overload.redispatch(keys & rest, *args)
        start_ns = recorder.now_ns()
        recorder.begin(_WAIT, name_id)
        try:
            return overload.redispatch(keys & rest, *args)
        finally:
            recorder.end(_WAIT, name_id)
            session.waited_ns += recorder.now_ns() - start_ns

    return tap
