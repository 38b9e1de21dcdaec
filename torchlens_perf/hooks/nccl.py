"""When NCCL's kernels ran, by the device's clock: through NCCL's profiler plugin, else by events around the call.

The plugin writes into the record of the collective that torch issued (native/collective_parts.c). Here it is offered to
NCCL, switched on and off, and what it could not tell is said.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens_perf import native_tap, nccl_plugin, recorder, torch_private
from torchlens_perf.errors import guard
from torchlens_perf.hooks.collective_events import CollectiveEvents
from torchlens_perf.hooks.patch import patched
from torchlens_perf.nccl_plugin import Counters, NcclPlugin

if TYPE_CHECKING:
    from torchlens_perf.session import Session

_TOO_LATE = (
    "asynchronous collectives have no end, as NCCL's communicators were made before its plugin was there: enter "
    "watch() before init_process_group(), or start with the flag or TORCHLENS_PERF=1"
)
_SAID = {
    "elsewhere": "NCCL operations were not issued through torch.distributed and are not recorded",
    "captured": "NCCL operations became part of graphs, whose replays are not recorded",
    "lost": "collectives have no end, which NCCL should have told",
    "distrusted": "NCCL communicators told the times of other operations, as they do after a rank has sent to itself "
    "(all-to-all): their collectives have no end",
}


class NcclHook:
    """Offers the plugin before the first communicator, and has NCCL tell of its kernels, in some steps or all.

    Attached behind the device's hook: what this one asks of the device's clock at a step's end, that has read before.
    """

    name = "NCCL's kernels"

    def __init__(
        self, *, asked_for: bool, environ: MutableMapping[str, str] = os.environ, nccl: tuple[int, ...] | None = None
    ) -> None:
        """asked_for: in every step, whatever this NCCL pays for it. nccl: its version; without it, torch's is asked."""
        self._asked_for = asked_for
        self._environ = environ
        self._nccl = nccl
        self._every = 1
        self._before = Counters(*[0] * len(Counters._fields))
        self._told: set[str] = set()

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        with ExitStack() as attached:
            plugin, file = nccl_plugin.load(), nccl_plugin.path()
            missing = self._offer(plugin, file)
            if missing or plugin is None or file is None:
                self._note(session, f"asynchronous collectives have no end, as NCCL's plugin is not used: {missing}")
                attached.enter_context(_by_events(session))
            else:
                attached.enter_context(self._by_plugin(session, plugin, file, attached))
            yield

    def _note(self, session: Session, text: str) -> None:
        """For jobs of several ranks: NCCL runs nothing on a lone one."""
        if session.communicates():
            session.note(text)

    def _offer(self, plugin: NcclPlugin | None, file: Path | None) -> str:
        """Offers it to NCCL. Why it cannot be used; "" if it can."""
        nccl = self._nccl or nccl_plugin.version()
        if nccl is None:
            return "this torch came without NVIDIA's NCCL"
        self._every = nccl_plugin.steps_between(nccl)
        if self._every == 0:
            return f"NCCL {'.'.join(map(str, nccl))} does not tell when they ran; 2.27 and newer ones do"
        if self._asked_for:
            self._every = 1
        if plugin is None or file is None:
            return "it was not built: install a C compiler and reinstall torchlens_perf"
        other = nccl_plugin.offer(self._environ, file)
        if other is not None:
            return f"another one was chosen, and stays ({other})"
        if not plugin.attach():
            nccl_plugin.withdraw(self._environ, file)
            return "it was built for another version of torchlens_perf: reinstall it"
        return ""

    @contextmanager
    def _by_plugin(self, session: Session, plugin: NcclPlugin, file: Path, attached: ExitStack) -> Iterator[None]:
        self._before = plugin.counters()
        captures = _Captures()

        def switch() -> None:
            plugin.switch(on=not captures.under_way and session.training_steps % self._every == 0)

        def look() -> None:
            if self._every == 1:
                switch()  # a capture that we did not see has switched it off
            counters = plugin.counters()
            self._tell(session, counters, last=False)
            if not counters.communicators and _TOO_LATE not in self._told and _runs(session):
                self._told.add(_TOO_LATE)
                self._note(session, _TOO_LATE)
                attached.enter_context(_by_events(session))

        try:
            with (
                captures.seen(switch),
                session.now_and_then(self.name, look),
                ExitStack() as sampling,
            ):
                if self._every > 1:
                    sampling.enter_context(session.each_step(self.name, switch))
                    self._note(session, f"NCCL's kernels are timed in one step of {self._every}")
                switch()
                yield
        finally:
            nccl_plugin.withdraw(self._environ, file)
            if not session.recorder.closed:  # in a forked child the plugin is the parent's, and its lock may be held
                plugin.switch(on=False)
                plugin.detach()
                self._tell(session, plugin.counters(), last=True)

    def _tell(self, session: Session, counters: Counters, *, last: bool) -> None:
        """At once that there are some, for a job that is killed; at the end, how many."""
        since = {field: now - then for field, now, then in zip(counters._fields, counters, self._before, strict=True)}
        since["lost"] = session.recorder.lost_ends  # of torch's operations, which NCCL may have lost a part of
        for field, text in _SAID.items():
            number = since[field]
            if number and (last or field not in self._told):
                self._told.add(field)
                session.note(f"{number} {text}" if last else f"some {text}")


def _runs(session: Session) -> bool:
    """Whether NCCL has run a collective."""
    return any(torch_private.backend_of_group(*group) == "nccl" for group in session.device_groups)


class _Captures:
    """torch's captures of CUDA graphs. A kernel that is timed in a graph costs a call of the host at each replay."""

    def __init__(self) -> None:
        self.under_way = 0

    @contextmanager
    def seen(self, changed: Callable[[], None]) -> Iterator[None]:
        """Calls `changed` before one begins and when one has ended, for as long as the context is entered."""
        import torch

        graph, left = torch.cuda.CUDAGraph, False
        begin, end = graph.capture_begin, graph.capture_end

        @guard("a capture with NCCL")
        def count(more: int) -> None:
            if not left:  # another tool may have wrapped ours, and keep it
                self.under_way = max(0, self.under_way + more)
                changed()

        @wraps(begin)
        def capture_begin(*args: Any, **kwargs: Any) -> Any:
            count(1)
            try:
                return begin(*args, **kwargs)
            except BaseException:
                count(-1)  # nobody will end it
                raise

        @wraps(end)
        def capture_end(*args: Any, **kwargs: Any) -> Any:
            try:
                return end(*args, **kwargs)
            finally:
                count(-1)

        try:
            with patched(graph, "capture_begin", capture_begin), patched(graph, "capture_end", capture_end):
                yield
        finally:
            left = True


@contextmanager
def _by_events(session: Session) -> Iterator[None]:
    if not recorder.NATIVE:  # the Python twin waits for nobody to tell an end
        yield
        return
    events = CollectiveEvents(session)
    native = native_tap.load()
    with session.each_step("device times of collectives", events.read):
        session.collective_events = events
        if native is not None:
            native.time_with(events.begin)
        try:
            yield
        finally:
            session.collective_events = None
            if native is not None:
                native.time_with(None)
