"""Recomputation of activations inside of the backward pass, as torch's checkpointing does it.

Whatever was checkpointed, a module, its forward method, or a function: what runs again is timed as a whole, also where
no watched module is called in it. Checkpointing of another kind is seen where watched modules run again; where they do
not, its time is in the backward pass, and the report says that it was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import HookUnavailable
from torchlens_perf.hooks.loop.training_loop import RECOMPUTE
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.patch import patched
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_RECOMPUTE = int(Kind.RECOMPUTE)


class RecomputeHook:
    """Brackets what both of torch's implementations run again; a backward pass inside of it is taken out."""

    name = "recompute"

    def __init__(self) -> None:
        self.running = 0
        """How many checkpoints of torch's own are being run again. Counts the recorded thread's passes."""

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        try:
            torch_private.require(torch_private.RECOMPUTATION)
        except HookUnavailable:
            session.metadata.not_measured(RECOMPUTE)
            raise
        from torch.utils import checkpoint

        recorder, thread, name_id = session.recorder, session.thread, session.intern("checkpoint")
        again = checkpoint._recomputation_hook  # the context around what is run again
        enter, leave = again.__enter__, again.__exit__
        backward = checkpoint.CheckpointFunction.backward  # with use_reentrant=True
        tracing = torch_private.tracing_context()

        def entered(self: Any) -> Any:
            recorder.begin(_RECOMPUTE, name_id)
            return enter(self)

        def left(self: Any, *error: Any) -> Any:
            try:
                return leave(self, *error)
            finally:
                recorder.end(_RECOMPUTE, name_id)

        def reentrant(ctx: Any, *gradients: Any) -> Any:
            if recorder.closed or tracing() is not None:
                return backward(ctx, *gradients)
            recorder.begin(_RECOMPUTE, name_id)
            here = thread.is_current()
            self.running += here
            try:
                return backward(ctx, *gradients)
            finally:
                self.running -= here
                recorder.end(_RECOMPUTE, name_id)

        with (
            patched(again, "__enter__", entered),
            patched(again, "__exit__", left),
            patched(checkpoint.CheckpointFunction, "backward", staticmethod(reentrant)),
        ):
            yield
