"""watch() and Watch: attach the hooks, record, and detach everything again. Start reading the code
here.

::

    watch(model) ─▶ Session (recorder, hooks) ──marks──▶ ring file ─▶ sidecar ─▶ run directory, OTLP
      │                                                                  │
      └─ on leaving: detaches, ends the ring, prints on rank 0 ◀─report──┘
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from torchlens_perf import config as configuration
from torchlens_perf.config import ENVIRONMENT_PREFIX, Config
from torchlens_perf.errors import (
    ConfigError,
    RunStoreError,
    guard,
    printable,
    require,
    switch_off_on_error,
)
from torchlens_perf.hooks import device_hooks
from torchlens_perf.hooks.failure import current_exceptions, describe_failure, find_new_exception
from torchlens_perf.hooks.loop import arguments
from torchlens_perf.interruption import ours, suppress
from torchlens_perf.output import above_standard_streams, logger
from torchlens_perf.recorder import keep_ring, sidecar
from torchlens_perf.recorder.folder_request import MADE, FolderRequest
from torchlens_perf.recorder.recorder import find_recording_obstacle
from torchlens_perf.results import last_report
from torchlens_perf.results.methods import LiveResultMethods
from torchlens_perf.run import children, dead_runs, directory, file_checks, make_folders
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.identity import detect_identity as detect_identity
from torchlens_perf.run.mailbox import REPORT, Mailbox
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    from multiprocessing.util import Finalize

    from torch.nn import Module
    from torch.optim import Optimizer
    from typing_extensions import ParamSpec, Unpack

    from torchlens_perf.config import WatchSettings
    from torchlens_perf.hooks.loop.selection import NamedModel
    from torchlens_perf.hooks.loop.training_loop import TrainingLoop
    from torchlens_perf.recorder.session import Session
    from torchlens_perf.results.ask import RunHandle
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.rank_facts import ReportRequest
    from torchlens_perf.run.ring import RingFile

    P = ParamSpec("P")

_T = TypeVar("_T")

# A watch delays the start of a job by at most 2 s, which include starting child processes, and its
# end by 1.5 s by default (tests/jobs/test_bounded_waits.py).
_FOLDERS_TIMEOUT_S = 1.8
# After the report, a sidecar gets at least this long to take over a ring that lies in this
# process's memory.
_MIN_HANDOVER_S = 0.3

TAGS = {"evaluation": Flag.EVALUATION | Flag.EVALUATED, "checkpoint": Flag.CHECKPOINT}
"""Flags that each argument of Watch.tag() sets."""

_changing = threading.RLock()
"""Lock held while a watch starts or detaches."""
_running: Watch | None = None
_session: Session | None = None
"""The session whose hooks are attached, or are being attached or detached."""
_watches_so_far = 0
_forked_while_recording = False
already_printed: set[str] = set()
"""Reasons for not recording that this process has shown, here or in autoload.py."""


def watch(
    model: Module | Iterable[Module] | Mapping[str, Module] | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    **settings: Unpack[WatchSettings],
) -> Watch:
    """Record where each step's time goes, from entering the returned context until leaving it.

        with perf.watch(model, optimizer) as w:
            for batch in loader:
                loss = model(batch).loss
                loss.backward()
                optimizer.step()

    Instead of `with`, call `w = perf.watch(model, optimizer).start()` and `w.stop()`. As a
    decorator, `@perf.watch()` records each call of a function as a run.

    model: the model to time per module, a list of models, or a dictionary of models by name. The
    default is all models whose parameters an optimizer updates. With several models, module names
    begin with the model's name. optimizer: the optimizer, or several, whose calls of step() end a
    step; wrappers of frameworks are accepted. By default, the steps of all optimizers count.
    settings: fields of Config as keywords, or config=Config(...).

    The training thread only writes marks into a memory-mapped file. One sidecar process per node
    does all other work. With TORCHLENS_PERF=0 nothing is attached. Raise ConfigError for an invalid
    argument.
    """
    models, optimizers = arguments.parse_models(model), arguments.parse_optimizers(optimizer)
    try:
        enabled = configuration.is_recording_switched_on(os.environ) is not False
        environment = configuration.from_environment(os.environ)
    except ConfigError as error:
        # An invalid variable must not stop a job that would run without torchlens_perf.
        if str(error) not in already_printed:
            logger.warning("torchlens_perf is off: %s", error)
        enabled, environment = False, {}
    config = configuration.from_settings(settings, environment)
    if enabled and models is not None:
        try:
            arguments.check_module_patterns(models, config)
        except ConfigError as error:
            if config.modules != environment.get("modules"):
                raise
            logger.warning("torchlens_perf is off: %sMODULES: %s", ENVIRONMENT_PREFIX, error)
            enabled = False
            from torchlens_perf.hooks.loop import first_step

            first_step.stop_waiting_for_first_step()
    return Watch(config, models, optimizers, enabled=enabled)


def start_after_first_step(optimizer: Optimizer | None) -> Watch | None:
    """Start recording in a loop whose first step has just ended (autoload.py). Return None if
    nothing is recorded.

    optimizer: the optimizer that made the step; None in a loop without one. Raise ConfigError for
    an invalid setting.
    """
    started = watch()
    if not started._record(in_the_middle=True, after_step_of=optimizer):
        return None
    started._stop_at_exit()
    return started


def _signature() -> inspect.Signature:
    """The signature of watch() with each setting, for help() and editors that read signatures."""
    shown = inspect.signature(watch)
    *parameters, _ = shown.parameters.values()
    parameters += [
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type
        )
        for each in configuration.public_fields()
    ]
    config = inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Config | None"
    )
    return shown.replace(parameters=[*parameters, config])


watch.__signature__ = _signature()  # type: ignore[attr-defined]


class Watch(LiveResultMethods):
    """Recording of one run: a context manager to enter once, a pair of start() and stop(), or a
    decorator.
    """

    def __init__(
        self,
        config: Config,
        models: list[NamedModel] | None,
        optimizers: list[Optimizer],
        *,
        enabled: bool,
    ) -> None:
        self._config = config
        self._models = models
        self._optimizers = list(optimizers)
        self._enabled = enabled
        self._identity: Identity | None = None
        self._session: Session | None = None
        self._ending: Session | None = None
        self._disk_answers = True
        self._loop: TrainingLoop | None = None
        self._joined: Watch | None = None
        self._entered = False
        self._finalizer: Finalize | None = None
        self._earlier_exceptions: tuple[BaseException | None, ...] = ()
        watched = [*(each.module for each in models or ()), *optimizers]
        self._what = ", ".join([type(each).__name__ for each in watched]) or "what is trained"
        self.run_dir: Path | None = None
        """The run directory; None before the watch is entered and if nothing is recorded."""

    def __repr__(self) -> str:
        session = (self._joined or self)._session
        if session is not None:
            state = f"recording, step {session.recorder.step}"
        elif self.run_dir is not None:
            state = "ended"
        else:
            state = "off" if self._entered or not self._enabled else "not started"
        where = "" if self.run_dir is None else f", run_dir={str(self.run_dir)!r}"
        return f"<Watch of {self._what}: {state}{where}>"

    def __call__(self, function: Callable[P, _T]) -> Callable[P, _T]:
        """Return a wrapper of a function that records each call as a separate run.

        Raise ConfigError for a coroutine or a generator function, whose body runs after the call
        has returned.
        """
        suspends = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        require(
            callable(function) and not suspends and not inspect.isgeneratorfunction(function),
            f"@watch() on {function!r}: must be a plain function; use `with watch():` inside of it",
        )
        start = functools.partial(
            Watch, self._config, self._models, self._optimizers, enabled=self._enabled
        )

        @functools.wraps(function)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> _T:
            with start():
                return function(*args, **kwargs)

        return recorded

    def start(self) -> Watch:
        """Start recording, as entering the context does. Return this watch.

        Recording ends with stop() or with the process.
        """
        self.__enter__()
        try:
            self._stop_at_exit()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Detach everything and, on rank 0, show the report, as leaving the context does.

        Further calls do nothing.
        """
        error = None
        try:
            error = find_new_exception(self._earlier_exceptions)
            atexit.unregister(self.stop)
            if self._finalizer is not None:
                self._finalizer.cancel()
        finally:
            self.__exit__(None, error, None)

    def _stop_at_exit(self) -> None:
        from multiprocessing.util import Finalize

        self._earlier_exceptions = current_exceptions()
        atexit.register(self.stop)
        # A process that multiprocessing forked ends without atexit handlers, but runs its own
        # finalizers.
        self._finalizer = Finalize(None, self.stop, exitpriority=100)

    def __enter__(self) -> Watch:
        with _changing:
            require(
                not self._entered,
                "this watch was entered before; a watch is entered once: make a new one with watch()",
            )
            self._entered = True
        try:
            with _changing:
                if not self._enabled:
                    self._models, self._optimizers = None, []
                elif _running is None:
                    self._record()
                else:
                    self._join_running_watch(_running)
        except BaseException:
            # An interruption may arrive when recording has already begun.
            self._stop_recording(None, None)
            raise
        return self

    def _join_running_watch(self, running: Watch) -> None:
        """Add this watch's models and callbacks to the watch that is already recording."""
        self._joined = running
        models, self._models, self._optimizers = self._models, None, []
        if models is not None:
            with guard("watching further models"):
                if running._session is not None and running._loop is not None:
                    running._loop.use_given_models(models)
        for callback in self._live_views.alerts.callbacks if self._live_views is not None else ():
            running.on_verdict(callback)
        self.run_dir = running.run_dir

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the watch. error: the exception that leaves the context or ends the program."""
        try:
            if self._joined is not None:
                self._joined = None
            else:
                self._end(error)
        finally:
            self._stop_recording(None, error)

    def step(self, tokens: int | None = None) -> None:
        """End a step. After the first call, only step() ends steps.

        tokens: amount of work in this step on this rank, in tokens or any unit that its duration
        grows with. By default, elements of the first tensor of each batch are counted. A rank with
        more work is not reported as slow for it. Raise ConfigError for a negative number.
        """
        if tokens is not None and (
            isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens < 1 << 40
        ):
            raise ConfigError(f"tokens={tokens!r}: must be a whole number, from 0 to {1 << 40}")
        watch = self._joined or self
        if watch._session is not None:
            watch._session.step.end_by_user(tokens)
        elif self._enabled and not self._entered:
            _warn_not_started()

    def steps_by_hand(self, model_steps: int | None = None) -> None:
        """Let only step() end steps.

        For callers that call step() in every step, such as callbacks of frameworks.

        model_steps: number of steps that the model has made so far, in earlier processes too.
        """
        watch = self._joined or self
        if watch._loop is not None:
            watch._loop.on_manual_step()
        if watch._session is not None and model_steps is not None:
            watch._session.metadata.set_model_steps(model_steps, watch._session.recorder.step)

    def tag(self, what: str) -> None:
        """Mark the current step as more than training. It is not compared with other ranks' steps.

        what: "evaluation" or "checkpoint". Forward passes without gradients and calls of
        torch.save() are detected without this. Raise ConfigError for another word.
        """
        require(what in TAGS, f"what={what!r}: must be {' or '.join(map(repr, TAGS))}")
        session = (self._joined or self)._session
        if session is not None:
            session.step.add_flag(TAGS[what])

    def _recording_watch(self) -> Watch:
        return _running if _running is not None and _running.run_dir == self.run_dir else self

    def _get_run_handle(self) -> RunHandle:
        from torchlens_perf.results.ask import RunHandle

        watch = self._recording_watch()
        off = "it has not begun, or the log says why not" if self._enabled else "it is switched off"
        folder, shared = self.run_dir, watch._config.is_shared
        run = None if folder is None else RunDirectory(folder, shared=shared)
        return RunHandle(run, watch._session, watch._config.sidecar, f"nothing is recorded: {off}")

    @above_standard_streams()
    def _record(
        self, *, in_the_middle: bool = False, after_step_of: Optimizer | None = None
    ) -> bool:
        """Create ring, sidecar, run directory and hooks. Return True if recording has started.

        in_the_middle: True in a loop that has already made its first step (autoload.py).
        after_step_of: the optimizer whose step has just returned; None in a loop without one. Raise
        ConfigError for an invalid argument before anything is created. After any other failure, one
        line is logged, nothing stays attached, and the job continues unrecorded.
        """
        global _session
        with _changing:
            if self._enabled and _running is None:
                try:
                    self._start(in_the_middle=in_the_middle, after_step_of=after_step_of)
                except BaseException:
                    self._stop_recording(None, None)
                    raise
                finally:
                    if self._session is None:
                        _session = None
            return self._session is not None

    def _start(self, *, in_the_middle: bool, after_step_of: Optimizer | None) -> None:
        global _running, _session
        # Keep no reference: the user may delete models inside the watch to free their memory.
        models, self._models = self._models, None
        optimizers, self._optimizers = self._optimizers, []
        with (
            switch_off_on_error(lambda reason: _log_not_recording(reason, self._identity)),
            ExitStack() as cleanup,
        ):
            obstacle = find_recording_obstacle()
            if obstacle is not None:
                raise RunStoreError(str(obstacle))
            from torchlens_perf.hooks import attach
            from torchlens_perf.hooks.loop import first_step

            first_step.stop_waiting_for_first_step()
            device_hooks.check_merging_config(self._config)
            run, session = self._create_ring_and_sidecar(cleanup, first_step=int(in_the_middle))
            _session = session
            self._loop = attach.attach_hooks(
                session,
                optimizers,
                models,
                in_the_middle=in_the_middle,
                after_step_of=after_step_of,
            )
            del optimizers
            if not self._config.sidecar:
                run.register_ring(session.identity.node, session.ring_path)
            if "trl.trainer.grpo_trainer" in sys.modules:
                # Jobs without roles do not need this module.
                import_module("torchlens_perf.roles.recording").follow_trainer(run.run_id)
            self._session, self.run_dir, _running = session, run.path, self
            cleanup.pop_all()
            if self._live_views is not None:
                self._live_views.start_views(self._get_run_handle())

    def _create_ring_and_sidecar(
        self, cleanup: ExitStack, first_step: int
    ) -> tuple[RunDirectory, Session]:
        """Create ring, folders and sidecar, each of which may fail.

        Register their removal in `cleanup`.
        """
        global _watches_so_far
        from torchlens_perf.recorder.session import Session

        config, earlier = self._config, _watches_so_far
        _watches_so_far += 1
        with ExitStack() as leaving, ExitStack() as created:
            leaving.push(functools.partial(_withdraw_from_merging, config))
            if config.sidecar:
                children.check_sidecar_can_start()
            identity = self._identity = detect_identity(os.environ, directory.claim_run_id, earlier)
            run = RunDirectory(
                _absolute_path(config.dir) / identity.run_id, shared=config.is_shared
            )
            created.callback(run.remove_empty_local_folders)
            folders = FolderRequest(run.folders, shared=run.shared) if config.sidecar else None
            if folders is None:
                created.callback(make_folders.remove_empty_folders, [*run.create(), str(run.rings)])
            else:
                created.callback(folders.close)
            ring = directory.create_ring(
                run, identity, config.ring_capacity, first_step=first_step, keep=not config.sidecar
            )
            try:
                created.callback(_remove_ring, run, ring)
            except BaseException:
                _remove_ring(run, ring)
                raise
            if not config.sidecar and not ring.path.is_relative_to(run.path):
                # At the end, a child process copies the ring into the run directory. Look for its
                # interpreter now.
                children.find_interpreter()
            session = Session(config, identity, ring)
            created.callback(session.close)
            session.publish()
            if folders is not None:
                answer = folders.wait_for_answer(_FOLDERS_TIMEOUT_S)
                self._disk_answers = bool(answer)
                # An empty answer means that the disk has not responded yet. The sidecar keeps
                # trying.
                if answer not in (MADE, ""):
                    raise RunStoreError(
                        f"cannot write to {run.path}: {answer}. Choose another folder by dir="
                    )
                # The sidecar starts before the hooks are attached: attaching imports for seconds,
                # in which the job may be killed.
                run.register_ring(identity.node, ring.path)
                sidecar.ensure_running(run, identity, config._exchange_token)
                folders.keep_folders()
                if not identity.local_rank:
                    with guard("looking for rings of jobs that were killed"):
                        dead_runs.start_draining(but=run.run_id)
                # From now on the sidecar removes the ring and empty folders.
                cleanup.callback(_close_incomplete_session, session)
                created.pop_all()
            cleanup.push(created.pop_all())
            leaving.pop_all()
        return run, session

    def _end(self, error: BaseException | None) -> None:
        """Detach and show the report. error: the exception that leaves the context.

        This function does not access the run directory's disk, which may hang. The function waits
        only for the report, for a limited time.
        """
        with ExitStack() as changing:
            # The lock is released after detaching, before waiting for the report.
            changing.enter_context(_changing)
            session = self._session
            if session is not None and self.run_dir is not None:
                run = RunDirectory(self.run_dir, shared=self._config.is_shared)
                self._close(session, run, changing, error)

    def _stop_recording(self, report: ReportRequest | None, error: BaseException | None) -> None:
        """Detach everything and close the session. report: see Session.close().

        Further calls do nothing. After an exception, the next call completes the work.
        """
        global _running, _session
        if self._session is None and self._ending is None:
            return
        with _changing:
            if self._session is not None:
                self._ending, self._session = self._session, None
            if _running is self:
                _running = None
            if self._ending is not None:
                self._ending.close(report, describe_failure(error, self._ending.recorder.step))
                _session = self._ending = None

    def _close(
        self,
        session: Session,
        run: RunDirectory,
        changing: ExitStack,
        error: BaseException | None,
    ) -> None:
        """Close the session and show the report. changing: the lock on starting watches."""
        identity, mailbox, began_s = session.identity, None, time.monotonic()
        removed_ring = (
            session.ring_path
            if file_checks.is_missing(session.ring_path, follow_links=False)
            else None
        )
        look: ReportRequest | None = None
        try:
            # The session is closed even if the user's own stderr raises KeyboardInterrupt: no
            # record is lost.
            try:
                cell, is_live = self._end_live_views()
                reports = (self._config.prints_report and identity.rank == 0) or is_live
                with guard("asking for the report"):
                    if reports and self._config.sidecar:
                        # The folder may have been removed with the ring.
                        with suppress(FileNotFoundError):
                            mailbox = Mailbox(session.ring_path, REPORT)
                if reports:
                    look = last_report.build_report_request(mailbox, in_cell=cell is not None)
            finally:
                self._stop_recording(look, error)
            changing.close()
            # A new sidecar cannot read a removed ring. It would replace one that has the ring open.
            if self._config.sidecar and removed_ring is None:
                # If the sidecar was killed, a new one finishes its work.
                with guard("starting the sidecar again"):
                    sidecar.ensure_running(run, identity, self._config._exchange_token)
            if reports:
                with guard("the report at the end"):
                    shown = last_report.show_report(
                        run, identity, self._config, mailbox, cell, began_s,
                        raised=error is not None, disk_answers=self._disk_answers,
                        removed_ring=removed_ring,
                    )  # fmt: skip
                    if self._live_views is not None:
                        self._live_views.write_report(shown)
        finally:
            self._stop_recording(look, error)
            if mailbox is not None:
                with guard("asking for the report"):
                    mailbox.close()
            timeout_s = self._config._exit_timeout_s
            timeout_s = last_report.SHORT_TIMEOUT_S if timeout_s is None else timeout_s
            left_s = max(_MIN_HANDOVER_S, timeout_s - (time.monotonic() - began_s))
            with guard("keeping the ring"):
                self._wait_for_ring_takeover(run, session, left_s)

    def _wait_for_ring_takeover(
        self, run: RunDirectory, session: Session, timeout_s: float
    ) -> None:
        """Wait, at most this long, until another process has taken over a ring in this process's
        memory.
        """
        ring, identity, problem = session.ring, session.identity, ""
        if not self._config.sidecar:
            problem = keep_ring.copy_ring_to_run(run, identity.host, ring, timeout_s)
            ring.release()
        elif not ring.release(timeout_s):
            problem = "the sidecar did not take it over"
        if problem:
            logger.warning("torchlens_perf: rank %d's ring: %s", identity.rank, problem)

    def _forget_session(self) -> None:
        """Forget the parent's session in a forked child, which may start its own."""
        global _running
        session, self._session, self._ending = self._session, None, None
        if self._live_views is not None:
            self._live_views.stop_views()
        if session is not None:
            session.abandon()
        if _running is self:
            _running = None


def _remove_ring(run: RunDirectory, ring: RingFile) -> None:
    ring.release()
    run.remove_ring(ring.path)


def _close_incomplete_session(session: Session) -> None:
    """Close a session whose hooks could not be attached.

    The sidecar, already running, removes the ring.
    """
    with guard("noting that recording is off"):
        session.note("recording was switched off when it began: see the job's log")
    session.close()
    session.ring.release()


def _absolute_path(folder: str | os.PathLike[str]) -> Path:
    try:
        return Path(folder).absolute()
    # The working directory may have been removed.
    except ours(OSError) as error:
        raise RunStoreError(
            f"dir={folder!r}: the working directory cannot be found: {error.strerror}"
        ) from None


def _withdraw_from_merging(
    config: Config,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    """Withdraw from merging if the block fails: other ranks must not wait for this one."""
    if isinstance(error, Exception):
        with guard("declining to merge with other ranks"):
            device_hooks.decline_configured_merging(config)


@functools.cache
def _warn_not_started() -> None:
    logger.warning(
        "torchlens_perf: step() records nothing before the watch is started: use `with watch(...)"
        " as w:`, or w.start()"
    )


def _log_not_recording(reason: str, identity: Identity | None) -> None:
    """Log the reason once per node: as a warning on the first rank that fails, as info on others.

    identity: this rank's identity, if it is known. If ranks cannot agree on the first rank, all of
    them warn.
    """
    # An obstacle is the same on all ranks of the node and in all of their watches.
    first = find_recording_obstacle() is None or (
        reason not in already_printed and os.environ.get("LOCAL_RANK", "0") == "0"
    )
    already_printed.add(reason)
    if identity is not None:
        with suppress(OSError, RunStoreError):
            first = directory.is_first_caller(
                f"{identity.run_id}.{identity.attempt}",
                identity.launcher_pid if identity.world_size > 1 else identity.pid,
            )
    logger.log(
        logging.WARNING if first else logging.INFO, "torchlens_perf is off: %s", printable(reason)
    )


def forked_while_recording() -> bool:
    """Return True if this process was forked from one that was recording."""
    return _forked_while_recording


def _forget_watch_in_child() -> None:
    global _changing, _forked_while_recording, _session
    # The inherited lock may be held by a thread that does not exist in the child.
    _changing = threading.RLock()
    session, _session = _session, None
    _forked_while_recording = session is not None
    if session is not None:
        from torchlens_perf.hooks.loop import first_step
        from torchlens_perf.hooks.loop.optimizer import relay

        if _running is not None:
            _running._forget_session()
        session.abandon()
        first_step.stop_waiting_for_first_step()
        relay.before = relay.after = None


os.register_at_fork(after_in_child=_forget_watch_in_child)
