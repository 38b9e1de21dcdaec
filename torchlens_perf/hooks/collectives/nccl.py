"""Record device times of NCCL's kernels, by NCCL's profiler plugin or by events around the call.

The plugin writes into the record of the collective that torch issued (native/collective_parts.c).
This module offers the plugin to NCCL, switches it on and off, and notes which times are missing.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.errors import guard
from torchlens_perf.hooks.collectives import nccl_plugin
from torchlens_perf.hooks.collectives.nccl_plugin import GiveUpCause, NcclPlugin, PluginCounters
from torchlens_perf.recorder import torch_groups
from torchlens_perf.recorder.clocks import MAX_UNREAD_STEPS
from torchlens_perf.recorder.patch import patched

if TYPE_CHECKING:
    from torchlens_perf.recorder.clocks import Clock
    from torchlens_perf.recorder.session import Session

_TOO_LATE = (
    "end times of asynchronous collectives are missing: the NCCL communicators were created before"
    " the profiler plugin was loaded. Enter watch() before init_process_group(), or start with the"
    " flag or TORCHLENS_PERF=1"
)
_PROBLEM_NOTES = {
    "elsewhere": "NCCL operations were not issued through torch.distributed and are not recorded",
    "crowded": "collectives have no end time, because an NCCL group had more than 64 of them",
    "lost": "collectives have no end time, because NCCL did not report it",
}
_GIVEN_UP = {
    GiveUpCause.CAPTURED_OPERATION: "an operation of NCCL was captured in a CUDA graph",
    GiveUpCause.SELF_COPY: "a rank sent to itself, as in all-to-all",
    GiveUpCause.IMPOSSIBLE_TIME: "NCCL reported an impossible time for a kernel",
    GiveUpCause.UNSEEN_GRAPH: "a CUDA graph was replayed that was captured outside of watch()",
    GiveUpCause.MANY_COMMUNICATORS: "there were more than 1024 communicators at once",
    GiveUpCause.NO_ROOM: (
        "shared memory has no room for the data that NCCL needs to time another communicator"
    ),
}
_captured: dict[int, weakref.ref[Any]] = {}
"""CUDA graphs that were captured inside a watch of this process, by id."""


def _remember_graph(graph: Any) -> None:
    _captured[id(graph)] = weakref.ref(graph, partial(_captured.pop, id(graph)))


class NcclHook:
    """Hook that offers the plugin to NCCL early, and switches it on and off.

    Attach this hook after DeviceTimesHook, which reads the device's clock at the end of a step.
    """

    name = "NCCL's kernels"

    def __init__(self, wish: str, *, nccl: tuple[int, ...] | None = None) -> None:
        """wish: the value of Config.nccl. nccl: NCCL's version, or None to read it from torch."""
        self._wish = wish
        self._nccl = nccl
        self._every = 1
        self._before = PluginCounters(*[0] * len(PluginCounters._fields))
        self._reported: set[str] = set()

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        with ExitStack() as attached:
            plugin, file = nccl_plugin.load_plugin(), nccl_plugin.find_plugin_file()
            missing = self._offer_plugin(
                plugin, file, session.identity.local_world_size or session.identity.world_size
            )
            if missing or plugin is None or file is None:
                self._note_if_multi_rank(
                    session,
                    "end times of asynchronous collectives are missing: NCCL's profiler plugin is"
                    f" not used: {missing}",
                )
                attached.enter_context(_time_by_events(session))
            else:
                attached.enter_context(self._time_by_plugin(session, plugin, file, attached))
            yield

    def _note_if_multi_rank(self, session: Session, text: str) -> None:
        """Note a problem in a job with several ranks. With a single rank NCCL runs no kernel."""
        if session.identity.has_other_ranks:
            session.note(text)

    def _offer_plugin(self, plugin: NcclPlugin | None, file: Path | None, local_ranks: int) -> str:
        """Offer the plugin to NCCL. Return the reason if NCCL cannot use it, or "".

        local_ranks: the number of ranks on this node.
        """
        if self._wish == "off":
            return 'nccl="auto" enables it'
        nccl = self._nccl or nccl_plugin.read_nccl_version()
        if nccl is None:
            return "this torch was built without NVIDIA's NCCL"
        self._every = nccl_plugin.compute_timing_interval(nccl, asked_for=self._wish == "on")
        if self._every == 0 and nccl[:2] < nccl_plugin.OLDEST_NCCL:
            return (
                f"NCCL {'.'.join(map(str, nccl))} does not report kernel times; 2.28 and newer"
                " versions do"
            )
        if self._every == 0:
            return (
                f'nccl="auto" times NCCL 2.28 to 2.30, and this is {".".join(map(str, nccl))}; nccl="on"'
                " times some steps"
            )
        if plugin is None or file is None:
            return "it was not built: install a C compiler and reinstall torchlens_perf"
        if plugin.counters().given_up:
            return _given_up_reason(plugin.counters())
        no_room = nccl_plugin.find_shared_memory_problem(local_ranks)
        if no_room:
            return no_room
        other = nccl_plugin.offer_plugin(os.environ, file)
        if other is not None:
            return f"another profiler plugin is configured and is kept ({other})"
        if not plugin.attach():
            nccl_plugin.withdraw_plugin(os.environ, file)
            return "it was built for another version of torchlens_perf: reinstall it"
        return ""

    @contextmanager
    def _time_by_plugin(
        self, session: Session, plugin: NcclPlugin, file: Path, attached: ExitStack
    ) -> Iterator[None]:
        self._before = plugin.counters()
        captures = _GraphCaptureWatcher(plugin)
        by_events = False

        def switch_plugin() -> None:
            plugin.switch_timing(
                on=not captures.under_way and session.recorder.training_steps % self._every == 0
            )

        def fall_back_to_events(why: str) -> None:
            nonlocal by_events
            if not by_events:
                by_events = True
                self._note_if_multi_rank(session, why)
                attached.enter_context(_time_by_events(session))

        def check_counters() -> None:
            counters = plugin.counters()
            self._note_missing_times(session, counters, last=False)
            if counters.given_up:
                fall_back_to_events(
                    "end times of asynchronous collectives are missing from here on:"
                    f" {_given_up_reason(counters)}"
                )
            elif not counters.communicators and any(
                torch_groups.get_group_backend(*group) == "nccl"
                for group in session.metadata.device_groups
            ):
                # NCCL has run a collective without the plugin.
                fall_back_to_events(_TOO_LATE)

        try:
            with (
                captures.watch_captures(switch_plugin),
                session.run_throttled(self.name, check_counters),
                ExitStack() as sampling,
            ):
                if self._every > 1:
                    sampling.enter_context(session.running_each_step(self.name, switch_plugin))
                    self._note_if_multi_rank(
                        session, f"NCCL's kernels are timed in one step of {self._every}"
                    )
                switch_plugin()
                yield
        finally:
            nccl_plugin.withdraw_plugin(os.environ, file)
            if session.recorder.closed:
                plugin.reset_after_fork()
            else:
                plugin.switch_timing(on=False)
                plugin.detach()
                self._note_missing_times(session, plugin.counters(), last=True)
                if plugin.counters().given_up and not by_events:
                    reason = _given_up_reason(plugin.counters())
                    self._note_if_multi_rank(
                        session,
                        f"end times of asynchronous collectives are missing at the end: {reason}",
                    )

    def _note_missing_times(
        self, session: Session, counters: PluginCounters, *, last: bool
    ) -> None:
        """Note that some operations have no times, and at the end of the watch how many.

        The report on a killed job thus has at least the first note.
        """
        since = {
            field: now - then
            for field, now, then in zip(counters._fields, counters, self._before, strict=True)
        }
        # The recorder counts operations of which NCCL did not report all parts.
        since["lost"] = session.recorder.lost_ends
        for field, text in _PROBLEM_NOTES.items():
            number = since[field]
            if number and (last or field not in self._reported):
                self._reported.add(field)
                session.note(f"{number} {text}" if last else f"some {text}")


def _given_up_reason(counters: PluginCounters) -> str:
    """Return the reason why NCCL's kernels are no longer timed."""
    return (
        f"{_GIVEN_UP[GiveUpCause(counters.given_up)]}, after which NCCL's times are unreliable in this"
        " process"
    )


class _GraphCaptureWatcher:
    """Watcher of CUDA graph captures, and of replays of graphs captured outside of a watch.

    NCCL's counters of captured operations differ from the device's counters unless the capture was
    timed. Timing in a capture would add a host call to each replay.
    """

    def __init__(self, plugin: NcclPlugin) -> None:
        self.under_way = 0
        self._plugin = plugin

    @contextmanager
    def watch_captures(self, changed: Callable[[], None]) -> Iterator[None]:
        """Call `changed` before each capture begins and after it has ended."""
        import torch

        graph, is_detached = torch.cuda.CUDAGraph, False
        begin, end, original_replay = graph.capture_begin, graph.capture_end, graph.replay
        plugin = self._plugin

        @guard("a capture with NCCL")
        def change_capture_count(more: int) -> None:
            # Another tool may have wrapped this wrapper and may still call it after the watch.
            if not is_detached:
                self.under_way = max(0, self.under_way + more)
                changed()

        @guard("a capture with NCCL")
        def note_capture(captured: Any) -> None:
            if not is_detached:
                _remember_graph(captured)
                change_capture_count(1)

        @guard("a replay with NCCL")
        def note_unseen_replay(captured: Any) -> None:
            _remember_graph(captured)  # Report each graph once.
            plugin.note_unseen_graph()

        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            note_capture(self)
            try:
                return begin(self, *args, **kwargs)
            except BaseException:
                # capture_end() is not called after a failed capture_begin().
                change_capture_count(-1)
                raise

        def capture_end(*args: Any, **kwargs: Any) -> Any:
            try:
                return end(*args, **kwargs)
            finally:
                change_capture_count(-1)

        def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self) not in _captured and not is_detached:
                note_unseen_replay(self)
            return original_replay(self, *args, **kwargs)

        try:
            with (
                patched(graph, "capture_begin", capture_begin),
                patched(graph, "capture_end", capture_end),
                patched(graph, "replay", replay),
            ):
                yield
        finally:
            is_detached = True


@contextmanager
def _time_by_events(session: Session) -> Iterator[None]:
    events = CollectiveEvents(session)
    with session.running_each_step("device times of collectives", events.report_known_times):
        session.clocks.set_collective_listener(events.store_marks)
        try:
            yield
        finally:
            session.clocks.set_collective_listener(None)


class _PendingCollective(NamedTuple):
    """A collective whose device times are not known yet."""

    ticket: int
    clock: Clock
    begin: int
    end: int
    step: int


class CollectiveEvents:
    """Recorder of device times of synchronous collectives, by events on the current stream.

    Used where NCCL's plugin does not report times. Asynchronous collectives are not timed, because
    they end on another stream. Does nothing without a device clock.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pending: deque[_PendingCollective] = deque()

    @guard("timing a collective")
    def store_marks(self, begin: int, end: int) -> None:
        """Store the marks around a collective, as a Clocks.collective_listener."""
        ticket = self._session.recorder.claim()
        if ticket:
            self._pending.append(
                _PendingCollective(
                    ticket, self._session.clocks.current, begin, end, self._session.recorder.step
                )
            )

    def report_known_times(self) -> None:
        """Report known device times to the recorder. Called at the end of each step."""
        recorder = self._session.recorder
        while self._pending:
            first = self._pending[0]
            times = first.clock.span(first.begin, first.end)
            if times is not None:
                start_ns, duration_ns = times
                recorder.part_over(first.ticket, start_ns, start_ns + duration_ns)
            elif recorder.step - first.step < MAX_UNREAD_STEPS:
                return
            else:
                recorder.part_over(first.ticket)
            self._pending.popleft()
