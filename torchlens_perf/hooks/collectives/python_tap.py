"""Tap the dispatcher from Python: for operations without a native tap and without torch's hooks.

The Python tap costs about 50 us per operation. Once registered, it stays until the process ends
(native/tap.cpp explains why). Outside of a watch, it only forwards operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.hooks.collectives.python_recording import Issued, PythonRecording, find_device
from torchlens_perf.recorder import torch_dispatcher, torch_private
from torchlens_perf.recorder.torch_private import WAIT_TENSOR

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

# The owner that torch_dispatcher.find_kernel_owner() returns for these kernels.
OWNER = "torchlens_perf's Python tap"
_PEERS = ("root_rank", "dst", "src")

_libraries: dict[str, Any] = {}
"""Library object with the tap's kernel, by operator."""
_handlers: dict[str, Callable[..., Any]] = {}
"""Handler of the current watch, by operator.

Each access is a single atomic operation under the GIL.
"""


@contextmanager
def attach_tap(
    operators: Sequence[str], recording: PythonRecording, session: Session
) -> Iterator[None]:
    """Record calls of these operators on all threads while the context is active."""
    try:
        for operator in operators:
            _handlers[operator] = (
                _create_wait_handler(session)
                if operator == WAIT_TENSOR
                else _create_recording_handler(operator, recording)
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


def _get_overload(operator: str) -> Any:
    import torch

    namespace, _, name = operator.partition("::")
    return getattr(getattr(torch.ops, namespace), name).default


def _create_recording_handler(operator: str, recording: PythonRecording) -> Callable[..., Any]:
    """Return the function that records and forwards calls of one operator."""
    from torch._C._distributed_c10d import ProcessGroup

    overload, rest = _get_overload(operator), torch_dispatcher.get_remaining_keys()
    arguments = [argument.name for argument in overload._schema.arguments]
    group_at = arguments.index("process_group")
    async_at = arguments.index("async_op") if "async_op" in arguments else None
    peer_at = next((index for index, name in enumerate(arguments) if name in _PEERS), None)
    # An operation without a result blocks until its end. Other operations return a Work.
    blocking = not overload._schema.returns
    # A barrier's tensor argument is not a payload.
    has_payload = "barrier" not in operator

    @guard("collective tap")
    def record_issue(args: tuple[Any, ...]) -> Issued | None:
        return recording.issue(
            operator,
            ProcessGroup.unbox(args[group_at]).group_name,
            args[0] if has_payload else (),
            # In a gather, only the root has tensors in the first argument.
            find_device(*args[:2]),
            -1 if peer_at is None else int(args[peer_at]),
            is_async=async_at is None or len(args) <= async_at or bool(args[async_at]),
            blocking=blocking,
        )

    record_return = guard("collective tap")(recording.end_call)

    def record_and_redispatch(keys: Any, *args: Any) -> Any:
        issued = record_issue(args)
        raised = True
        try:
            result = overload.redispatch(keys & rest, *args)
            raised = False
            return result
        finally:
            if issued is not None:
                record_return(issued, raised=raised)

    return record_and_redispatch


def _create_wait_handler(session: Session) -> Callable[..., Any]:
    recorder = session.recorder
    overload = _get_overload(WAIT_TENSOR)
    rest = torch_dispatcher.get_remaining_keys()
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
