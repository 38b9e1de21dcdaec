"""Collectives: what was issued, until when it took, and how long the training thread was blocked for them.

A tap on the dispatcher sees every operation of c10d, also those that DDP's reducer, FSDP2, DTensor and compiled graphs
issue from C++; it sends them on unchanged. The native tap (native/tap.cpp) also learns from the backend when an
operation has ended, without the GIL. Without it the tap is Python, some 50 us an operation, and knows the end of those
that the caller waits for at once. There is no Python callback on a backend's thread: that aborted 3 of 19 processes at
their exit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.recorder import native_tap, torch_groups, torch_private
from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.recorder import End, timed_wait
from torchlens_perf.recorder.torch_private import WAIT_TENSOR
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_ASYNC, _EXCEPTION = int(Flag.ASYNC), int(Flag.EXCEPTION)
_NOT_COLLECTIVES = ("c10d::check_for_nan",)
_PEERS = ("root_rank", "dst", "src")
# How C++ names what Python calls torch.float32.
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}  # fmt: skip
# Backends whose future is complete when the operation is. NCCL's is when it has been enqueued.
_FUTURE_IS_COMPLETION = ("gloo",)


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
        session.recorder.start_collectives(session.intern("wait"))
        with ExitStack() as attached:
            attached.enter_context(self._tap(session))
            attached.enter_context(self._waits())
            yield

    @contextmanager
    def _tap(self, session: Session) -> Iterator[None]:
        torch_private.require("torch.ops.c10d at BackendSelect")
        groups = Groups(session)
        taps = {name: None for name in (*operators(), WAIT_TENSOR) if not _left_to_another(name, session)}
        native = native_tap.load()
        if native is not None:
            waits = [name for name in taps if name == WAIT_TENSOR]
            native.attach(
                native_tap.marks(), [name for name in taps if name != WAIT_TENSOR], waits, groups.describe_native
            )
            try:
                yield
            finally:
                native.detach()
            return
        if session.communicates():
            with guard("naming the native tap that is missing"):
                session.publish(missing_tap=native_tap.file_name())  # the sidecar has it built, and the report says so
        with self._python_tap(list(taps), groups, session):
            yield

    @contextmanager
    def _python_tap(self, taps: list[str], groups: Groups, session: Session) -> Iterator[None]:
        import torch

        libraries = {name: torch.library.Library(name, "IMPL") for name in ("c10d", "_c10d_functional")}
        try:
            for operator in taps:
                namespace, _, name = operator.partition("::")
                tap = _timed_wait_tensor(session) if operator == WAIT_TENSOR else _recorded(operator, groups, session)
                libraries[namespace].impl(name, tap, "BackendSelect", with_keyset=True)
            yield
        finally:
            for library in libraries.values():
                library._destroy()

    @contextmanager
    def _waits(self) -> Iterator[None]:
        torch_private.require("torch._C._distributed_c10d.Work.wait")
        from torch._C._distributed_c10d import Work

        with patched(Work, "wait", torch_private.break_in_compiled_code(timed_wait(Work.wait))):
            yield


def _left_to_another(operator: str, session: Session) -> bool:
    if native_tap.another_has_tapped(operator):
        session.note(f"{operator} is tapped by another tool and was left to it: not recorded")
        return True
    return False


class Groups:
    """Names for what is issued, and a row in the ring's table of groups for each group and pair of peers."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next: dict[str, int] = {}  # sequence number of each group's next operation (the Python tap)

    def describe_native(
        self, operator: str, group: str, dtype: str, peer: int, device: str, backend_sequence: int
    ) -> tuple[int, int, int, bool, bool]:
        """For the native tap, with the GIL: name id, slot, first sequence number, whether the future tells the end, and
        whether the end of a wait does.

        device: "cpu", "cuda", ... of the tensors. On others than the CPU, a wait only orders streams: its end is not
        the operation's.
        """
        with guard("naming a collective"):
            on_cpu = device == "cpu"
            if not on_cpu:
                self._session.add_device_group(group, device)
            calls_back = on_cpu and torch_groups.backend_of_group(group, device) in _FUTURE_IS_COMPLETION
            name_id, slot = self.describe(operator, group, _DTYPES.get(dtype, dtype.lower()), peer)
            return name_id, slot, max(0, backend_sequence), calls_back, on_cpu
        return 0, 1 << 16, 0, False, False

    def describe(self, operator: str, group: str, dtype: str, peer: int) -> tuple[int, int]:
        """The name's id, and the slot in the table of groups."""
        operation = operator.partition("::")[2].strip("_")
        text = f"{operation} group={group}" + (f" dtype={dtype}" if dtype else "")
        point_to_point = operation in ("send", "recv", "recv_any_source")
        if peer >= 0:
            text += f" {'peer' if point_to_point else 'root'}={peer}"
        slot = self._session.group_slot(f"{operation} group={group} peer={peer}" if point_to_point else group)
        if group not in self._session.groups:
            self._session.add_group(group, *torch_groups.members_of_group(group))
        return self._session.intern(text), slot

    def next_sequence(self, key: str, backend_sequence: int) -> int:
        """The sequence number of the next operation of a group, or of a pair of peers."""
        sequence = self._next.get(key, max(0, backend_sequence))
        self._next[key] = sequence + 1
        return sequence


def _overload(operator: str) -> Any:
    import torch

    namespace, _, name = operator.partition("::")
    return getattr(getattr(torch.ops, namespace), name).default


def _recorded(operator: str, groups: Groups, session: Session) -> Callable[..., Any]:
    """The Python tap of one operator."""
    from torch._C._distributed_c10d import ProcessGroup

    recorder, overload, rest = session.recorder, _overload(operator), torch_private.rest_of_dispatch()
    arguments = [argument.name for argument in overload._schema.arguments]
    group_at = arguments.index("process_group")
    async_at = arguments.index("async_op") if "async_op" in arguments else None
    peer_at = next((index for index, name in enumerate(arguments) if name in _PEERS), None)
    blocking = not overload._schema.returns  # waits inside the operation; all others are waited for through their Work
    point_to_point, payload = "tag" in arguments, "barrier" not in operator  # a barrier's tensor is none
    known: dict[tuple[str, Any, int], tuple[int, int, str]] = {}

    def first_tensor(value: Any) -> Any:
        while isinstance(value, (list, tuple)):
            value = value[0] if value else None
        return value

    @guard("collective tap")
    def issue(args: tuple[Any, ...]) -> tuple[Any, int, Callable[[], None] | None]:
        group = ProcessGroup.unbox(args[group_at])
        name = group.group_name
        peer = -1 if peer_at is None else int(args[peer_at])
        tensor = first_tensor(args[0])
        dtype = getattr(tensor, "dtype", None) if payload else None
        key = name, dtype, peer
        if key not in known:
            name_id, slot = groups.describe(operator, name, str(dtype).removeprefix("torch.") if dtype else "", peer)
            known[key] = name_id, slot, f"{operator}/{name}/{peer}" if point_to_point else name
        name_id, slot, counter = known[key]
        backend_sequence = 0 if point_to_point else torch_groups.sequence_of_group(group)
        sequence = groups.next_sequence(counter, backend_sequence)
        is_async = async_at is None or len(args) <= async_at or bool(args[async_at])
        # Who gathers nothing has tensors in the second argument alone.
        placed = first_tensor(args[1]) if tensor is None and len(args) > 1 else tensor
        # On a device, waiting for a Work only orders streams: its end is not the operation's.
        device = getattr(getattr(placed, "device", None), "type", "cpu")
        on_cpu = device == "cpu"
        end = End.BY_RETURN if blocking else End.BY_WAIT if on_cpu and not is_async else End.UNKNOWN
        issued = recorder.issue(
            name_id, slot, sequence, _ASYNC if is_async else 0, payload_bytes(args[0]) if payload else 0
        )
        if on_cpu or issued is None:
            return issued, int(end), None
        if (name, device) not in session.device_groups:
            session.add_device_group(name, device)
        stalls = None if is_async else session.stalls
        return issued, int(end), None if stalls is None else stalls.begin_collective()

    @guard("collective tap")
    def returned(issued: tuple[Any, int, Callable[[], None] | None], raised: bool) -> None:
        ticket, end, end_timing = issued
        if ticket is None:
            return
        if end_timing is not None:
            end_timing()
        if raised:
            recorder.returned(ticket, int(End.UNKNOWN), _EXCEPTION)
        else:
            recorder.returned(ticket, end)

    def tap(keys: Any, *args: Any) -> Any:
        issued = issue(args)
        raised = True
        try:
            result = overload.redispatch(keys & rest, *args)
            raised = False
            return result
        finally:
            if issued is not None:
                returned(issued, raised)

    return tap


def _timed_wait_tensor(session: Session) -> Callable[..., Any]:
    recorder, overload, rest = session.recorder, _overload(WAIT_TENSOR), torch_private.rest_of_dispatch()
    tracing = torch_private.tracing_context()

    def tap(keys: Any, *args: Any) -> Any:
        if tracing() is not None:
            return overload.redispatch(keys & rest, *args)
        records, raised = recorder.begin_wait(), True
        try:
            result = overload.redispatch(keys & rest, *args)
            raised = False
            return result
        finally:
            if records:
                recorder.end_wait(raised)

    return tap
