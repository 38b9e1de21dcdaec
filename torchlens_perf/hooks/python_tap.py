"""The Python tap on collectives, used where the native tap has not been built.

It costs about 50 us per operation. Once registered, it stays until the process ends, for the reason
given in native/tap.cpp. Outside of a watch it passes operations on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.recorder import torch_dispatcher, torch_groups, torch_private
from torchlens_perf.recorder.recorder import End
from torchlens_perf.recorder.torch_private import WAIT_TENSOR
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    from torchlens_perf.hooks.collective_groups import Groups
    from torchlens_perf.recorder.session import Session

# The owner that torch_dispatcher.owner_of_tap() returns for these kernels.
OWNER = "torchlens_perf's Python tap"
_ASYNC, _EXCEPTION = int(Flag.ASYNC), int(Flag.EXCEPTION)
_PEERS = ("root_rank", "dst", "src")

_libraries: dict[str, Any] = {}
"""The library that each operator's kernel is registered with."""
_handlers: dict[str, Callable[..., Any]] = {}
"""The current watch's handler for each operator.

Each access is a single operation under the GIL.
"""


@contextmanager
def attached(operators: Sequence[str], groups: Groups, session: Session) -> Iterator[None]:
    """Record calls of these operators from all threads for as long as the context is entered."""
    try:
        for operator in operators:
            _handlers[operator] = (
                _wait_tensor_handler(session)
                if operator == WAIT_TENSOR
                else _recording_handler(operator, groups, session)
            )
            if operator not in _libraries:
                namespace, _, name = operator.partition("::")
                library = torch_dispatcher.library(namespace, OWNER)
                library.impl(name, torch_dispatcher.KEY, _permanent_tap(operator), True)
                _libraries[operator] = library
        yield
    finally:
        _handlers.clear()


def _permanent_tap(operator: str) -> Callable[..., Any]:
    overload, rest = _overload(operator), torch_dispatcher.rest_of_dispatch()

    def tap(keys: Any, *args: Any) -> Any:
        handler = _handlers.get(operator)
        if handler is None:
            return overload.redispatch(keys & rest, *args)
        return handler(keys, *args)

    return tap


def payload_bytes(value: Any) -> int:
    """Return the size in bytes of the tensors in an operation's first argument."""
    if isinstance(value, (list, tuple)):
        return sum(payload_bytes(part) for part in value)
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0


def _overload(operator: str) -> Any:
    import torch

    namespace, _, name = operator.partition("::")
    return getattr(getattr(torch.ops, namespace), name).default


def _recording_handler(operator: str, groups: Groups, session: Session) -> Callable[..., Any]:
    """Return the function that records and forwards calls of one operator."""
    from torch._C._distributed_c10d import ProcessGroup

    recorder, overload, rest = (
        session.recorder,
        _overload(operator),
        torch_dispatcher.rest_of_dispatch(),
    )
    arguments = [argument.name for argument in overload._schema.arguments]
    group_at = arguments.index("process_group")
    async_at = arguments.index("async_op") if "async_op" in arguments else None
    peer_at = next((index for index, name in enumerate(arguments) if name in _PEERS), None)
    # An operation without a result blocks until it has ended. Others return a Work to wait for.
    blocking = not overload._schema.returns
    # A barrier has a tensor argument, which is not a payload.
    point_to_point, payload = "tag" in arguments, "barrier" not in operator
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
            name_id, slot = groups.describe(
                operator, name, str(dtype).removeprefix("torch.") if dtype else "", peer
            )
            known[key] = name_id, slot, f"{operator}/{name}/{peer}" if point_to_point else name
        name_id, slot, counter = known[key]
        backend_sequence = 0 if point_to_point else torch_groups.sequence_of_group(group)
        sequence = groups.next_sequence(counter, backend_sequence)
        is_async = async_at is None or len(args) <= async_at or bool(args[async_at])
        # In a gather, ranks other than the root have tensors in the second argument only.
        placed = first_tensor(args[1]) if tensor is None and len(args) > 1 else tensor
        # On a device, waiting for a Work only orders streams, so its end is not the operation's
        # end.
        device = getattr(getattr(placed, "device", None), "type", "cpu")
        on_cpu = device == "cpu"
        end = End.BY_RETURN if blocking else End.BY_WAIT if on_cpu and not is_async else End.UNKNOWN
        issued = recorder.issue(
            name_id,
            slot,
            sequence,
            _ASYNC if is_async else 0,
            payload_bytes(args[0]) if payload else 0,
        )
        if on_cpu or issued is None:
            return issued, int(end), None
        if (name, device) not in session.metadata.device_groups:
            session.metadata.add_device_group(name, device)
        stalls = None if is_async else session.clocks.stalls
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


def _wait_tensor_handler(session: Session) -> Callable[..., Any]:
    recorder, overload, rest = (
        session.recorder,
        _overload(WAIT_TENSOR),
        torch_dispatcher.rest_of_dispatch(),
    )
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
