"""Let a framework's callback start a watch, end its steps, and stop it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torchlens_perf import config as configuration
from torchlens_perf.config import Config
from torchlens_perf.errors import ConfigError, guard
from torchlens_perf.watching import Watch, watch


class FrameworkRun:
    """Watch of one training run, which a framework's callback controls on the training thread.

    If the job is already recording, because of an outer watch() or TORCHLENS_PERF=1, the callback
    joins that recording. Copies and pickles contain only the settings.
    """

    def __init__(self, settings: Mapping[str, Any], log_to: object) -> None:
        """Raise ConfigError for an invalid setting, or for an object that is not a logger."""
        configuration.from_settings(settings, {})
        self._settings = dict(settings)
        self._log_to = log_to
        self._watch: Watch | None = None
        if log_to is not None:
            from torchlens_perf.results.logged_verdicts import check_log_arguments

            check_log_arguments(log_to, None)

    @property
    def is_recording(self) -> bool:
        return self._watch is not None

    def begin(
        self,
        model: Any = None,
        step: Callable[[], int] | None = None,
        *,
        total_steps: int = 0,
        log_to: object = None,
    ) -> None:
        """Start recording. If an exception has left an earlier run open, end that run first.

        model: as in watch(). step: function that returns the framework's step number for loggers.
        With `step`, only FrameworkRun.step() ends steps. total_steps: 0 if not known. log_to: a
        logger in addition to the user's logger.
        """
        self.end()
        with guard("beginning a run of a framework"):
            config = self._settings.get("config") or Config()
            config = dataclasses.replace(config, _total_steps=max(0, total_steps))
            watched = self._watch = watch(model, **{**self._settings, "config": config}).start()
            if step is not None:
                watched.steps_by_hand(step())
            for each in (self._log_to, log_to):
                if each is not None:
                    watched.log_to(each, step=step)

    def step(self) -> None:
        if self._watch is not None:
            self._watch.step()

    def tag(self, what: str) -> None:
        """See Watch.tag()."""
        if self._watch is not None:
            with guard("tagging a step"):
                self._watch.tag(what)

    def end(self) -> None:
        """End the recording and show the report on rank 0. Further calls do nothing."""
        watched, self._watch = self._watch, None
        if watched is not None:
            with guard("ending a run of a framework"):
                watched.stop()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watch": None, "_log_to": None}


def missing_framework_error(framework: str, error: ImportError) -> ConfigError:
    """Return the error to raise if a framework cannot be imported."""
    return ConfigError(f"{framework} cannot be imported: {error}. Next: pip install {framework}")
