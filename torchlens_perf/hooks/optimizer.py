"""Optimizer steps, which are also where training steps end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.hooks.patch import patched
from torchlens_perf.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.session import Session

_OPTIMIZER = int(Kind.OPTIMIZER)


class OptimizerHook:
    """Global step hooks, which fire for every torch.optim.Optimizer, and a wrap of GradScaler.update.

    A wrapper that calls another optimizer's step fires twice, nested; the outermost is the step.
    """

    name = "optimizer"

    def __init__(self) -> None:
        self._open: list[tuple[int, int]] = []  # (id of the optimizer, its name_id), outermost first

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        recorder, opened = session.recorder, self._open
        name_ids: dict[type, int] = {}

        @guard("optimizer hook")
        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            kind = type(optimizer)
            if kind not in name_ids:
                name_ids[kind] = session.intern(f"optimizer {kind.__name__}")
            for index, (identity, name_id) in enumerate(opened):
                if identity == id(optimizer):  # its last step raised: torch then calls no post hook
                    recorder.drop(_OPTIMIZER, name_id)
                    del opened[index:]
                    break
            opened.append((id(optimizer), name_ids[kind]))
            recorder.begin(_OPTIMIZER, name_ids[kind])

        @guard("optimizer hook")
        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            while opened:
                identity, name_id = opened.pop()
                if identity == id(optimizer):
                    recorder.end(_OPTIMIZER, name_id)
                    break
            if not opened:
                session.optimizer_stepped(optimizer)

        update = torch.amp.GradScaler.update

        def timed_update(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = update(self, *args, **kwargs)
            session.scaler_updated()
            return result

        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            with patched(torch.amp.GradScaler, "update", timed_update):
                yield
        finally:
            for handle in handles:
                handle.remove()
