"""Keep the state of one watch: the recorder, data shared by hooks, and the attached hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torchlens_perf.config import Config
from torchlens_perf.errors import guard, swallowed
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.attached_hooks import AttachedHooks
from torchlens_perf.recorder.clocks import Clocks
from torchlens_perf.recorder.current_step import CurrentStep
from torchlens_perf.recorder.rank_metadata import RankMetadata
from torchlens_perf.recorder.recorder import Recorder
from torchlens_perf.recorder.sampling import SamplingSchedule
from torchlens_perf.recorder.step_callbacks import StepCallbacks
from torchlens_perf.recorder.training_thread import TrainingThread
from torchlens_perf.run.failure import Failure
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.rank_facts import ReportRequest
from torchlens_perf.run.ring import INTERNAL_ERRORS, RingFile


class Hook(Protocol):
    """A source of marks. attach() raises HookUnavailable if torch lacks a required API."""

    name: str

    def attach(self, session: Session) -> AbstractContextManager[None]:
        """Return a context in which the hook is attached. The exit detaches the hook."""


class Session:
    """The parts of one watch that hooks use. watching.py creates and closes the session."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        ring: RingFile,
        now_ns: Callable[[], int] | None = None,
    ) -> None:
        """now_ns: the recorder's clock, by default the host's."""
        self.config = config
        self.identity = identity
        self.ring = ring
        self.recorder = Recorder(ring.buffer, self.intern, now_ns)
        self.clocks = Clocks()
        self.metadata = RankMetadata(
            config, identity, ring, self.recorder, self.clocks.host.anchor(),
            reports_start=now_ns is None,
        )  # fmt: skip
        self.facts = self.metadata.facts
        self.thread = TrainingThread(self.recorder, self.metadata.note_threads)
        self.hooks = AttachedHooks(self.metadata.note)
        self.step_callbacks = StepCallbacks(self.metadata.note, self.recorder)
        self.step = CurrentStep(
            self.recorder,
            self.thread,
            self.hooks,
            self.step_callbacks,
            self.metadata,
            SamplingSchedule(config.backward_every, config.budget),
        )

        # Shortcuts to what nearly every hook needs.
        self.ring_path = ring.path
        self.note, self.publish = self.metadata.note, self.metadata.publish
        self.running_each_step = self.step_callbacks.running_each_step
        self.run_throttled = self.step_callbacks.run_throttled
        self.add_overhead = self.step.add_overhead

    def intern(self, name: str) -> int:
        """Return the id of a name, or 0 after the recorder has been closed."""
        return 0 if self.recorder.closed else self.ring.intern(name)

    # The life of a watch, in this order.

    def prepare(self) -> None:
        """Start counting errors of hooks, and keep torch.compile from tracing hooks.

        Call this method before attach().
        """
        swallowed.on_error = functools.partial(self.ring.count, INTERNAL_ERRORS)
        with guard("keeping torch.compile away from our hooks"):
            torch_private.make_dynamo_skip_package()

    def attach(self, hooks: Sequence[Hook]) -> None:
        """Attach hooks in order. An unavailable hook is noted and left out. Raises ConfigError."""
        with self.hooks.lock:
            if not self.hooks.detached:
                for hook in hooks:
                    self.hooks.attach(hook.name, functools.partial(hook.attach, self))
                self.publish()

    def close(self, report: ReportRequest | None = None, failure: Failure | None = None) -> None:
        """Detach all hooks, and end the ring file.

        report: the report that rank 0 requests. failure: how the run failed, if it did.
        Further calls do nothing. After an exception, the next call completes the work.
        """
        try:
            self._end(report, failure)
        # No record is lost if Ctrl-C or another interruption arrives here.
        except BaseException:
            self._end(report, failure)
            raise

    def _end(self, report: ReportRequest | None, failure: Failure | None) -> None:
        self.hooks.detach()
        if not self.recorder.closed:
            with guard("telling the sidecar of the end"):
                self.metadata.publish_end(report, failure)
        swallowed.on_error = None
        self.recorder.close()
        self.ring.close()

    def abandon(self) -> None:
        """Stop recording in a forked child and detach all hooks. The ring file belongs to the
        parent.

        Attached hooks would disturb a new watch in the child, which would wrap functions twice.
        """
        swallowed.on_error = None
        self.recorder.abandon()
        self.hooks.abandon()
