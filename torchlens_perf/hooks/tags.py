"""Tag steps in which Python collects garbage, torch.save() is called, or Dynamo compiles.

Tagged steps are not reported as slow. Garbage collections and checkpoints are also recorded as
sections "python gc" and "torch.save". Steps that save or compile are not compared between ranks.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.recorder import native_hook
from torchlens_perf.run.ring import GC_NS, Flag, Kind

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_SECTION, _EXCEPTION = int(Kind.SECTION), int(Flag.EXCEPTION)
# Collections of younger generations take microseconds, so only their total time is recorded.
_OLDEST_GENERATION = 2


class TagHook:
    """Hook that observes garbage collections, torch.save() and torch.compile's counters."""

    name = "tags"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        with (
            self._observe_garbage_collections(session),
            self._time_saves(session),
            session.step_callbacks.running_if_compiled(
                "watching torch.compile", _create_compilation_tagger(session)
            ),
        ):
            yield

    @contextmanager
    def _observe_garbage_collections(self, session: Session) -> Iterator[None]:
        recorder = session.recorder
        name_id = session.intern("python gc")
        now_ns = time.perf_counter_ns
        began_ns = 0  # Start of the current collection. Collections do not nest.

        def on_collection(phase: str, info: dict[str, int]) -> None:
            nonlocal began_ns
            if recorder.closed:
                return
            oldest = info.get("generation") == _OLDEST_GENERATION
            if phase == "start":
                if oldest:
                    recorder.begin(_SECTION, name_id)
                began_ns = now_ns()
                return
            if began_ns:  # The start is 0 if the watch began during this collection.
                session.ring.count(GC_NS, now_ns() - began_ns)
                began_ns = 0
            if oldest:
                recorder.end(_SECTION, name_id)
                session.step.add_flag(Flag.COLLECTED)

        callback = native_hook("collection", on_collection, recorder, name_id, int(Flag.COLLECTED))
        try:
            gc.callbacks.append(callback)
            yield
        finally:
            try:
                _remove_from_callbacks(callback)
            # Remove it even if Ctrl-C or another interruption arrives in the first call.
            finally:
                _remove_from_callbacks(callback)

    @contextmanager
    def _time_saves(self, session: Session) -> Iterator[None]:
        import torch

        recorder, name_id, save = session.recorder, session.intern("torch.save"), torch.save

        def timed_save(*args: Any, **kwargs: Any) -> Any:
            recorder.begin(_SECTION, name_id)
            flags = _EXCEPTION
            try:
                result = save(*args, **kwargs)
                flags = 0
                return result
            finally:
                recorder.end(_SECTION, name_id, flags)
                session.step.add_flag(Flag.CHECKPOINT)

        with patched(torch, "save", timed_save):
            yield


def _remove_from_callbacks(callback: object) -> None:
    """Remove a callback of garbage collections, unless the program has cleared the list."""
    gc.callbacks[:] = [each for each in gc.callbacks if each is not callback]


def _create_compilation_tagger(session: Session) -> Callable[[], None]:
    """Return a function that tags a step in which Dynamo has compiled a frame."""

    loaded, compiled_before = sys.modules, -1

    def tag_if_compiled() -> None:
        nonlocal compiled_before
        utils = loaded.get("torch._dynamo.utils")
        compiled = 0 if utils is None else utils.counters["frames"]["total"]
        if compiled > compiled_before >= 0:
            session.step.add_flag(Flag.COMPILED)
        compiled_before = compiled  # Lower than before if Dynamo's counters were cleared.

    tag_if_compiled()
    return tag_if_compiled
