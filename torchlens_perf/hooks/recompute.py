"""Time the recomputation of activations inside the backward pass (torch.utils.checkpoint).

Each recomputation is timed as a whole, also of a checkpointed forward method or function. Other
implementations of checkpointing are recognized only if they call watched modules again. Otherwise
their time counts as backward pass, and the report has a note.
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
    """Hook that times recomputation in torch's two implementations of checkpointing.

    A backward pass inside a recomputation does not count as recomputation.
    """

    name = "recompute"

    def __init__(self) -> None:
        self.running = 0
        """Number of torch checkpoints that the recorded thread is currently recomputing."""

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        try:
            torch_private.require(torch_private.RECOMPUTATION)
        except HookUnavailable:
            session.metadata.note_unmeasured_part(RECOMPUTE)
            raise
        from torch.utils import checkpoint

        recorder, thread, name_id = session.recorder, session.thread, session.intern("checkpoint")
        # torch enters this context manager around recomputed code.
        recomputation = checkpoint._recomputation_hook
        enter, leave = recomputation.__enter__, recomputation.__exit__
        backward = checkpoint.CheckpointFunction.backward  # Used with use_reentrant=True.
        tracing = torch_private.get_tracing_context_reader()

        def timed_enter(self: Any) -> Any:
            recorder.begin(_RECOMPUTE, name_id)
            return enter(self)

        def timed_exit(self: Any, *error: Any) -> Any:
            try:
                return leave(self, *error)
            finally:
                recorder.end(_RECOMPUTE, name_id)

        def timed_backward(ctx: Any, *gradients: Any) -> Any:
            if recorder.closed or tracing() is not None:
                return backward(ctx, *gradients)
            recorder.begin(_RECOMPUTE, name_id)
            is_recorded_thread = thread.is_current()
            self.running += is_recorded_thread
            try:
                return backward(ctx, *gradients)
            finally:
                self.running -= is_recorded_thread
                recorder.end(_RECOMPUTE, name_id)

        with (
            patched(recomputation, "__enter__", timed_enter),
            patched(recomputation, "__exit__", timed_exit),
            patched(checkpoint.CheckpointFunction, "backward", timed_backward),
        ):
            yield
