"""watch(): read this first. It makes the recorder and the hooks, attaches them, and takes everything away again.

::

    watch(model) ─▶ Session (recorder + hooks) ──marks──▶ ring file ──▶ sidecar process ─▶ run directory, OTLP
         │                                                                    │
         └── on leaving: detaches, ends the ring, and on rank 0 prints ◀── report.txt
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchlens_perf import config as configuration
from torchlens_perf import identity, run_directory, start_sidecar
from torchlens_perf.config import Config
from torchlens_perf.errors import ConfigError, RunStoreError, guard
from torchlens_perf.late_report import LateReport
from torchlens_perf.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from torchlens_perf.session import Session

logger = logging.getLogger("torchlens_perf")

_running: Watch | None = None
_watches_so_far = 0


def watch(
    model: Module | Iterable[Module] | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    **settings: Any,
) -> Watch:
    """Records where each step's time goes, from entering the returned context until leaving it.

    ::

        with perf.watch(model, optimizer) as w:
            for batch in loader:
                loss = model(batch).loss
                loss.backward()
                optimizer.step()

    model: what to time per module; without it, the first model that an optimizer steps is found and timed.
    optimizer: whose steps count; without it, every optimizer's.
    settings: the fields of Config.

    The training thread only writes marks into a memory-mapped file; another process, one per node, does the rest. With
    TORCHLENS_PERF=0 nothing is attached. Raises ConfigError for an argument that cannot be used.
    """
    models, optimizers = _modules(model), _optimizers(optimizer)
    try:
        enabled, told = configuration.is_on(os.environ) is not False, configuration.from_environment(os.environ)
    except ConfigError as error:
        # The environment is not the code's fault: it must not stop a job that runs without us.
        logger.warning("torchlens_perf is off: %s", error)
        enabled, told = False, {}
    return Watch(configuration.from_settings(settings, told), models, optimizers, enabled=enabled)


class Watch:
    """A watch: a context manager, entered once."""

    def __init__(
        self, config: Config, models: list[Module] | None, optimizers: list[Optimizer], *, enabled: bool
    ) -> None:
        self._config = config
        self._models = models
        self._optimizers = optimizers
        self._enabled = enabled
        self._session: Session | None = None
        self._joined: Watch | None = None
        self.run_dir: Path | None = None
        """The run directory, once entered; None where nothing is recorded."""

    def __enter__(self) -> Watch:
        if self._session is not None or self._joined is not None:
            raise ConfigError("this watch is entered already; make a new one with watch()")
        if not self._enabled:
            self._models, self._optimizers = None, []
            return self
        if _running is not None:
            self._joined = _running
            models, self._models, self._optimizers = self._models, None, []
            if models is not None:
                _running._watch_also(models)
            self.run_dir = _running.run_dir
            return self
        try:
            self.start()
        except RunStoreError as error:
            raise ConfigError(f"dir={self._config.dir!r}: {error}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._joined is not None:
            self._joined = None
        else:
            self.close()

    def step(self, tokens: int | None = None) -> None:
        """Ends a step here. From the first call on, nothing else ends one.

        tokens: how much work this rank had in the step, in tokens or whatever else its time grows with; without it, the
        elements of the first tensor of each batch are counted. A rank that has more to do is not called slow for it.
        Raises ConfigError for a negative number.
        """
        if tokens is not None and (
            isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens < 1 << 40
        ):
            raise ConfigError(f"tokens={tokens!r}: must be a whole number, from 0 to {1 << 40}")
        watch = self._joined or self
        if watch._session is not None:
            watch._session.manual_step(tokens)

    def start(self, after_step_of: Optimizer | None = None) -> None:
        """Makes the run directory, the ring, the hooks and the sidecar; does nothing where recording is off.

        after_step_of: the optimizer whose first step has just returned (launch.py).
        Raises RunStoreError where nothing can be kept.
        """
        global _running, _watches_so_far
        from torchlens_perf.session import Session

        if not self._enabled:
            return
        folder, earlier = Path(self._config.dir).absolute(), _watches_so_far
        _watches_so_far += 1
        who = identity.detect(os.environ, lambda digest: run_directory.claim_run_id(folder, digest), earlier)
        run = RunDirectory(folder / who.run_id)
        run.create()
        ring = run_directory.create_ring(
            run,
            who,
            self._config.ring_capacity,
            first_step=0 if after_step_of is None else 1,
            keep=not self._config.sidecar,
        )
        session = Session(self._config, who, ring, [id(optimizer) for optimizer in self._optimizers])
        session.publish()  # before the sidecar may look: attaching hooks imports for seconds, and we may be killed
        run.register_ring(who.host, ring.path)
        # The user may delete them inside the watch, to free their memory.
        models, self._models, self._optimizers = self._models, None, []
        try:
            session.start(models, after_step_of)
        except ConfigError:
            session.close({})
            raise
        self._session = session
        self.run_dir = run.path
        _running = self
        if self._config.sidecar:
            with guard("starting the sidecar"):
                start_sidecar.ensure(run, who)

    def close(self) -> None:
        """Detaches everything and, on rank 0, prints the report. Done by leaving the context; again is harmless."""
        global _running
        session, self._session = self._session, None
        if session is None or self.run_dir is None:
            return
        if _running is self:
            _running = None
        run, who = RunDirectory(self.run_dir), session.identity
        reports = self._config.report and who.rank == 0
        with guard("ending the watch"):
            run.report.unlink(missing_ok=True)
        session.close(_terminal() if reports else {})
        if self._config.sidecar:
            with guard("starting the sidecar again"):
                start_sidecar.ensure(run, who)  # if it was killed, another one finishes its work
        if reports:
            with guard("the report at the end"):
                _print_report(run, self._config, who.host)

    def abandon(self) -> None:
        """In a forked child: forgets the session, which is the parent's. The child may start one of its own."""
        global _running
        session, self._session = self._session, None
        if session is not None:
            session.abandon()
        if _running is self:
            _running = None

    def _watch_also(self, models: list[Module]) -> None:
        if self._session is not None:
            self._session.watch_models(models)


def running() -> Watch | None:
    """The watch that records in this process."""
    return _running


def _terminal() -> dict[str, Any]:
    """What the report should look like: the sidecar writes it, but does not see rank 0's terminal."""
    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    return {"columns": shutil.get_terminal_size((0, 0)).columns if sys.stderr.isatty() else 0, "color": color}


def _print_report(run: RunDirectory, config: Config, host: str) -> None:
    """Waits for the sidecar's report and prints it on stderr: stdout is the job's."""
    if not config.sidecar:
        print(f"torchlens_perf: recorded. Next: torchlens-perf sidecar {run.path}", file=sys.stderr)
        return
    deadline_s = time.monotonic() + config.exit_timeout_s
    late = LateReport(run, host)
    while not run.report.exists():
        if time.monotonic() > deadline_s:
            print(f"torchlens_perf: {late.line()}", file=sys.stderr)
            return
        time.sleep(0.01)
    print(run.report.read_text(), end="", file=sys.stderr, flush=True)


def _forget_in_child() -> None:
    if _running is not None:
        from torchlens_perf.hooks.optimizer import relay
        from torchlens_perf.launch import autoload

        _running.abandon()
        relay.before = relay.after = None
        autoload()  # a child of a recorded process may be a trainer too: it waits for a step of its own


os.register_at_fork(after_in_child=_forget_in_child)


def _modules(model: Any) -> list[Module] | None:
    if model is None:
        return None
    from torch.nn import Module

    models = [model] if isinstance(model, Module) else list(model) if isinstance(model, (list, tuple)) else [model]
    for each in models:
        if not isinstance(each, Module):
            raise ConfigError(f"model={type(each).__name__}: must be a torch.nn.Module, or a list of them")
    return models


def _optimizers(optimizer: Any) -> list[Optimizer]:
    if optimizer is None:
        return []
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in optimizers:
        if not callable(getattr(each, "step", None)):
            raise ConfigError(f"optimizer={type(each).__name__}: must have a step() method, or be a list of such")
    return optimizers
