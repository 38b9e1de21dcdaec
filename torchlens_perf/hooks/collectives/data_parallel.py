"""Mark waits of the compute stream in FSDP2 and DDP that the tap on collectives does not record.

FSDP2 calls `Stream.wait_event` to wait for:

- the parameters of each module before it computes (unshard);
- the previous module's reduce-scatter before it issues the next one;
- the last reduce-scatters at the end of the backward pass.

DDP waits in C++ for the buffers that it broadcasts before a forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.torch_private import DDP_BUFFERS, FSDP2

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_FSDP2_GROUPS = f"{FSDP2}._fsdp_param_group"
_BEFORE_WAIT = torch_private.FSDP2_BEFORE_WAIT


class DataParallelHook:
    """Hook that marks the device's waits in DDP and FSDP2, if the device has a clock."""

    name = "waits of FSDP2 and DDP"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        with ExitStack() as attached:
            if torch_private.is_usable(DDP_BUFFERS):
                attached.enter_context(_mark_ddp_buffer_waits(session))

            def patch_fsdp2_once_imported() -> None:
                # Wait until the job has imported FSDP2, because importing it takes a second.
                if _FSDP2_GROUPS not in sys.modules:
                    return
                session.step_callbacks.remove(patch_fsdp2_once_imported)
                if torch_private.is_usable(FSDP2):
                    attached.enter_context(
                        _Fsdp2Patches(session, sys.modules[_FSDP2_GROUPS]).apply()
                    )
                else:
                    session.note(
                        "waits of the device in FSDP2 are not recorded with this version of torch"
                    )

            with session.run_throttled(self.name, patch_fsdp2_once_imported):
                patch_fsdp2_once_imported()
                yield


@contextmanager
def _mark_ddp_buffer_waits(session: Session) -> Iterator[None]:
    from torch.nn.parallel import DistributedDataParallel

    sync, name_id = DistributedDataParallel._sync_buffers, session.intern("ddp buffers")

    def sync_in_stall(self: Any) -> Any:
        stalls = session.clocks.stalls
        if stalls is None:
            return sync(self)
        stalls.begin(name_id)
        try:
            return sync(self)
        finally:
            stalls.end()

    torch_private.break_graph_at(sync_in_stall)
    with patched(DistributedDataParallel, "_sync_buffers", sync_in_stall):
        yield


class _Fsdp2Patches:
    """Patches of five functions that FSDP2's parameter groups call.

    The wrappers pass arguments and results through unchanged.
    """

    def __init__(self, session: Session, module: Any) -> None:
        """module: FSDP2's module that defines FSDPParamGroup."""
        self._session = session
        self._module = module
        self._group = module.FSDPParamGroup
        self._unshard = session.intern("fsdp unshard")
        self._reduce = session.intern("fsdp reduce-scatter")
        self._last = session.intern("fsdp last reduce-scatter")
        # True if the current post_backward() will wait for a reduce-scatter.
        self._expects_wait = False
        self._is_waiting = False
        # True if FSDP2 has reduced gradients since the last finalize_backward().
        self._has_reduced = False

    @contextmanager
    def apply(self) -> Iterator[None]:
        with ExitStack() as attached:
            for owner, name, wrap in (
                (self._module, "foreach_all_gather_copy_out", self._wrap_copy_out),
                (self._module, "record_function", self._wrap_record_function),
                (self._module, "foreach_reduce", self._wrap_reduce),
                (self._group, "post_backward", self._wrap_post_backward),
                (self._group, "finalize_backward", self._wrap_finalize),
            ):
                marked = torch_private.break_graph_at(wrap(getattr(owner, name)))
                attached.enter_context(patched(owner, name, marked))
            yield

    def _wrap_copy_out(self, copy_out: Callable[..., Any]) -> Callable[..., Any]:
        """Wait for the all-gather before `copy_out`, to distinguish the wait from the copy.

        The same wait inside `copy_out` then ends immediately.
        """

        def copy_out_after_wait(result: Any, *args: Any, **kwargs: Any) -> Any:
            self._wait_for_unshard(result)
            return copy_out(result, *args, **kwargs)

        return copy_out_after_wait

    @guard("an unshard of FSDP2")
    def _wait_for_unshard(self, result: Any) -> None:
        stalls, event = self._session.clocks.stalls, result.all_gather_event
        if stalls is None or event is None:
            return  # Without an event, FSDP2 waits for a Work, and the tap records that wait.
        begun = stalls.begin(self._unshard)
        try:
            if begun is not None:
                import torch

                torch.get_device_module(
                    result.all_gather_output.device
                ).current_stream().wait_event(event)
        finally:
            stalls.end()

    def _wrap_post_backward(self, post_backward: Callable[..., Any]) -> Callable[..., Any]:
        def post_backward_with_wait(group: Any, *args: Any) -> Any:
            self._predict_wait(group)
            try:
                return post_backward(group, *args)
            finally:
                self._expects_wait = False
                self._end_wait()

        return post_backward_with_wait

    @guard("a post-backward of FSDP2")
    def _predict_wait(self, group: Any) -> None:
        context = group.comm_ctx
        # Since torch 2.13 several reduce-scatters may be in flight.
        states = getattr(context, "reduce_scatter_states", None)
        if states is None:
            pending = getattr(context, "reduce_scatter_state", None) is not None
        else:
            pending = len(states) >= getattr(context, "reduce_scatter_max_input_buffers", 1)
        self._expects_wait = (
            self._session.clocks.stalls is not None and group.reduce_grads and pending
        )

    def _wrap_record_function(self, record_function: Callable[..., Any]) -> Callable[..., Any]:
        """Begin a wait when a certain profiler range ends: post_backward() waits after that range.

        The wait ends when the reduction begins.
        """

        def record_function_before_wait(name: str, *args: Any) -> Any:
            made = record_function(name, *args)
            if self._expects_wait and name.startswith(_BEFORE_WAIT):
                self._expects_wait = False
                return _CallOnExit(made, self._begin_wait)
            return made

        return record_function_before_wait

    def _begin_wait(self) -> None:
        stalls = self._session.clocks.stalls
        if stalls is not None:
            self._is_waiting = True
            stalls.begin(self._reduce)

    def _end_wait(self) -> None:
        waits, self._is_waiting = self._is_waiting, False
        if waits and self._session.clocks.stalls is not None:
            self._session.clocks.stalls.end()

    def _wrap_reduce(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_after_wait(*args: Any, **kwargs: Any) -> Any:
            self._end_wait()
            self._has_reduced = True
            return reduce(*args, **kwargs)

        return reduce_after_wait

    def _wrap_finalize(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """Mark the wait for the last reduction in the first finalize_backward() of a pass.

        The calls of other groups in the same pass do not wait again.
        """

        def finalize_in_stall(group: Any) -> Any:
            stalls = self._session.clocks.stalls
            reduced = self._has_reduced
            self._has_reduced = False
            if stalls is None or not reduced:
                return finalize(group)
            stalls.begin(self._last)
            try:
                return finalize(group)
            finally:
                stalls.end()

        return finalize_in_stall


class _CallOnExit:
    """A context manager that wraps another one and calls a function after its exit."""

    def __init__(self, context: Any, then: Callable[[], None]) -> None:
        self._context, self._then = context, then

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        result = self._context.__exit__(*raised)
        self._then()
        return result
