"""Where torch's own data parallelism makes the compute stream wait, and no tap sees it: FSDP2, and DDP's buffers.

FSDP2 waits by `Stream.wait_event`: for the parameters of each module before it computes (unshard), for the previous
module's reduce-scatter before it issues the next one, and for the last ones at the end of the backward pass. DDP waits
in C++ for the buffers that it broadcasts before a forward pass.
"""

from __future__ import annotations

import functools
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
    """Marks what DDP and FSDP2 wait for. Without a clock of the device it does nothing."""

    name = "waits of FSDP2 and DDP"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        with ExitStack() as attached:
            if torch_private.works(DDP_BUFFERS):
                attached.enter_context(_ddp_buffers(session))

            def look_for_fsdp2() -> None:
                if _FSDP2_GROUPS not in sys.modules:  # it takes a second to import
                    return
                session.step_callbacks.remove(look_for_fsdp2)
                if torch_private.works(FSDP2):
                    attached.enter_context(_Fsdp2(session, sys.modules[_FSDP2_GROUPS]).attached())
                else:
                    session.note("what the device waits for in FSDP2 is not known with this torch")

            with session.throttled(self.name, look_for_fsdp2):
                look_for_fsdp2()
                yield


@contextmanager
def _ddp_buffers(session: Session) -> Iterator[None]:
    from torch.nn.parallel import DistributedDataParallel

    sync, name_id = DistributedDataParallel._sync_buffers, session.intern("ddp buffers")

    @functools.wraps(sync)
    def marked(self: Any) -> Any:
        stalls = session.clocks.stalls
        if stalls is None:
            return sync(self)
        stalls.begin(name_id)
        try:
            return sync(self)
        finally:
            stalls.end()

    with patched(DistributedDataParallel, "_sync_buffers", torch_private.break_in_compiled_code(marked)):
        yield


class _Fsdp2:
    """Stands in for four functions that FSDP2's groups of parameters call, and sends all of them on unchanged."""

    def __init__(self, session: Session, module: Any) -> None:
        """module: FSDP2's, of its groups of parameters."""
        self._session = session
        self._module = module
        self._group = module.FSDPParamGroup
        self._unshard = session.intern("fsdp unshard")
        self._reduce = session.intern("fsdp reduce-scatter")
        self._last = session.intern("fsdp last reduce-scatter")
        self._expects_wait = False  # for a reduce-scatter, in the post_backward() that runs now
        self._waits = False  # and has begun to
        self._reduced = False  # since a backward pass was last finished

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as attached:
            for owner, name, wrap in (
                (self._module, "foreach_all_gather_copy_out", self._copying_out),
                (self._module, "record_function", self._ranges),
                (self._module, "foreach_reduce", self._reducing),
                (self._group, "post_backward", self._post_backward),
                (self._group, "finalize_backward", self._finalizing),
            ):
                original = getattr(owner, name)
                marked = torch_private.break_in_compiled_code(functools.wraps(original)(wrap(original)))
                attached.enter_context(patched(owner, name, marked))
            yield

    def _copying_out(self, copy_out: Callable[..., Any]) -> Callable[..., Any]:
        """It waits for the all-gather first, and then copies. The wait is made here, so that a mark is between."""

        def marked(result: Any, *args: Any, **kwargs: Any) -> Any:
            self._wait_for_unshard(result)
            return copy_out(result, *args, **kwargs)

        return marked

    @guard("an unshard of FSDP2")
    def _wait_for_unshard(self, result: Any) -> None:
        stalls, event = self._session.clocks.stalls, result.all_gather_event
        if stalls is None or event is None:
            return  # without an event it waits for a Work, which is tapped
        begun = stalls.begin(self._unshard)
        try:
            if begun is not None:
                import torch

                torch.get_device_module(result.all_gather_output.device).current_stream().wait_event(event)
        finally:
            stalls.end()

    def _post_backward(self, post_backward: Callable[..., Any]) -> Callable[..., Any]:
        def marked(group: Any, *args: Any) -> Any:
            self._expect_wait(group)
            try:
                return post_backward(group, *args)
            finally:
                self._expects_wait = False
                self._end_wait()

        return marked

    @guard("a post-backward of FSDP2")
    def _expect_wait(self, group: Any) -> None:
        context = group.comm_ctx
        states = getattr(context, "reduce_scatter_states", None)  # torch 2.13: several may be in flight
        if states is None:
            pending = getattr(context, "reduce_scatter_state", None) is not None
        else:
            pending = len(states) >= getattr(context, "reduce_scatter_max_input_buffers", 1)
        self._expects_wait = self._session.clocks.stalls is not None and group.reduce_grads and pending

    def _ranges(self, record_function: Callable[..., Any]) -> Callable[..., Any]:
        """The profiler's ranges say how far post_backward() is: it waits between the end of one and the reduction."""

        def marked(name: str, *args: Any) -> Any:
            made = record_function(name, *args)
            if self._expects_wait and name.startswith(_BEFORE_WAIT):
                self._expects_wait = False
                return _Then(made, self._begin_wait)
            return made

        return marked

    def _begin_wait(self) -> None:
        stalls = self._session.clocks.stalls
        if stalls is not None:
            self._waits = True
            stalls.begin(self._reduce)

    def _end_wait(self) -> None:
        waits, self._waits = self._waits, False
        if waits and self._session.clocks.stalls is not None:
            self._session.clocks.stalls.end()

    def _reducing(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._end_wait()
            self._reduced = True
            return reduce(*args, **kwargs)

        return marked

    def _finalizing(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """The first group's waits for the newest reduction; later groups' have nothing left to wait for."""

        def marked(group: Any) -> Any:
            stalls, reduced, self._reduced = self._session.clocks.stalls, self._reduced, False
            if stalls is None or not reduced:
                return finalize(group)
            stalls.begin(self._last)
            try:
                return finalize(group)
            finally:
                stalls.end()

        return marked


class _Then:
    """A context, and what to call when it has been left."""

    def __init__(self, context: Any, then: Callable[[], None]) -> None:
        self._context, self._then = context, then

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        result = self._context.__exit__(*raised)
        self._then()
        return result
