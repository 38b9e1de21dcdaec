"""Record collectives from Python where the native tap has not been built.

The Python tap costs about 50 us per operation. Once registered, it stays until the process ends
(native/tap.cpp explains why). Outside of a watch, it only forwards operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.recorder import torch_dispatcher, torch_groups, torch_private
from torchlens_perf.recorder.recorder import EndDetection
from torchlens_perf.recorder.torch_private import WAIT_TENSOR
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    from torchlens_perf.hooks.collective_groups import CollectiveGroups
    from torchlens_perf.recorder.session import Session

# The owner that torch_dispatcher.find_kernel_owner() returns for these kernels.
OWNER = "torchlens_perf's Python tap"
_ASYNC, _EXCEPTION = int(Flag.ASYNC), int(Flag.EXCEPTION)
_PEERS = ("root_rank", "dst", "src")

_libraries: dict[str, Any] = {}
"""Library object with the tap's kernel, by operator."""
_handlers: dict[str, Callable[..., Any]] = {}
"""Handler of the current watch, by operator.

Each access is a single atomic operation under the GIL.
"""


@contextmanager
def attach_tap(
    operators: Sequence[str], groups: CollectiveGroups, session: Session
) -> Iterator[None]:
    """Record calls of these operators on all threads while the context is active."""
    try:
        for operator in operators:
            _handlers[operator] = (
                _create_wait_handler(session)
                if operator == WAIT_TENSOR
                else _create_recording_handler(operator, groups, session)
            )
            if operator not in _libraries:
                namespace, _, name = operator.partition("::")
                library = torch_dispatcher.create_library(namespace, OWNER)
                library.impl(name, torch_dispatcher.KEY, _create_permanent_tap(operator), True)
                _libraries[operator] = library
        yield
    finally:
        _handlers.clear()


def _create_permanent_tap(operator: str) -> Callable[..., Any]:
    overload, rest = _get_overload(operator), torch_dispatcher.get_remaining_keys()

    def call_current_handler(keys: Any, *args: Any) -> Any:
        handler = _handlers.get(operator)
        if handler is None:
            return overload.redispatch(keys & rest, *args)
        return handler(keys, *args)

    return call_current_handler


def count_payload_bytes(value: Any) -> int:
    """Return the size in bytes of the tensors in an operation's first argument."""
    if isinstance(value, (list, tuple)):
        return sum(count_payload_bytes(part) for part in value)
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0


def _get_overload(operator: str) -> Any:
    import torch

    namespace, _, name = operator.partition("::")
    return getattr(getattr(torch.ops, namespace), name).default


def _create_recording_handler(
    operator: str, groups: CollectiveGroups, session: Session
) -> Callable[..., Any]:
    """Return the function that records and forwards calls of one operator."""
    from torch._C._distributed_c10d import ProcessGroup

    recorder, overload, rest = (
        session.recorder,
        _get_overload(operator),
        torch_dispatcher.get_remaining_keys(),
    )
    arguments = [argument.name for argument in overload._schema.arguments]
    group_at = arguments.index("process_group")
    async_at = arguments.index("async_op") if "async_op" in arguments else None
    peer_at = next((index for index, name in enumerate(arguments) if name in _PEERS), None)
    # An operation without a result blocks until its end. Other operations return a Work.
    blocking = not overload._schema.returns
    # A barrier's tensor argument is not a payload.
    point_to_point, payload = "tag" in arguments, "barrier" not in operator
    known: dict[tuple[str, Any, int], tuple[int, int, str]] = {}

    def find_first_tensor(value: Any) -> Any:
        while isinstance(value, (list, tuple)):
            value = value[0] if value else None
        return value

    @guard("collective tap")
    def record_issue(args: tuple[Any, ...]) -> tuple[Any, int, Callable[[], None] | None]:
        group = ProcessGroup.unbox(args[group_at])
        name = group.group_name
        peer = -1 if peer_at is None else int(args[peer_at])
        tensor = find_first_tensor(args[0])
        dtype = getattr(tensor, "dtype", None) if payload else None
        key = name, dtype, peer
        if key not in known:
            name_id, slot = groups.register_operation(
                operator, name, str(dtype).removeprefix("torch.") if dtype else "", peer
            )
            known[key] = name_id, slot, f"{operator}/{name}/{peer}" if point_to_point else name
        name_id, slot, counter = known[key]
        backend_sequence = 0 if point_to_point else torch_groups.get_group_sequence_number(group)
        sequence = groups.next_sequence_number(counter, backend_sequence)
        is_async = async_at is None or len(args) <= async_at or bool(args[async_at])
        # In a gather, only the root has tensors in the first argument.
        placed = find_first_tensor(args[1]) if tensor is None and len(args) > 1 else tensor
        # On a device, waiting for a Work only orders streams. The operation may end later.
        device = getattr(getattr(placed, "device", None), "type", "cpu")
        on_cpu = device == "cpu"
        end = (
            EndDetection.BY_RETURN
            if blocking
            else EndDetection.BY_WAIT
            if on_cpu and not is_async
            else EndDetection.UNKNOWN
        )
        issued = recorder.issue(
            name_id,
            slot,
            sequence,
            _ASYNC if is_async else 0,
            count_payload_bytes(args[0]) if payload else 0,
        )
        if on_cpu or issued is None:
            return issued, int(end), None
        if (name, device) not in session.metadata.device_groups:
            session.metadata.add_device_group(name, device)
        stalls = None if is_async else session.clocks.stalls
        return issued, int(end), None if stalls is None else stalls.begin_collective()

    @guard("collective tap")
    def record_return(issued: tuple[Any, int, Callable[[], None] | None], raised: bool) -> None:
        ticket, end, end_timing = issued
        if ticket is None:
            return
        if end_timing is not None:
            end_timing()
        if raised:
            recorder.returned(ticket, int(EndDetection.UNKNOWN), _EXCEPTION)
        else:
            recorder.returned(ticket, end)

    def record_and_redispatch(keys: Any, *args: Any) -> Any:
        issued = record_issue(args)
        raised = True
        try:
            result = overload.redispatch(keys & rest, *args)
            raised = False
            return result
        finally:
            if issued is not None:
                record_return(issued, raised)

    return record_and_redispatch


def _create_wait_handler(session: Session) -> Callable[..., Any]:
    recorder, overload, rest = (
        session.recorder,
        _get_overload(WAIT_TENSOR),
        torch_dispatcher.get_remaining_keys(),
    )
    tracing = torch_private.get_tracing_context_reader()

    def wait_and_record(keys: Any, *args: Any) -> Any:
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

    return wait_and_record
