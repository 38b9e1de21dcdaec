"""One training run of a framework, as its callback sees it: a watch that is begun, stepped and ended by calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torchlens_perf import config as configuration
from torchlens_perf.config import Config
from torchlens_perf.errors import ConfigError, guard
from torchlens_perf.watch import Watch, watch


class FrameworkRun:
    """What callbacks share. Training thread. Copies and pickles of it are of its settings: the run stays where it is.

    Where the job records already, by a watch() around the framework's call or without one by TORCHLENS_PERF=1, it joins
    that: nothing is recorded twice.
    """

    def __init__(self, settings: Mapping[str, Any], log_to: object, log_every_s: float) -> None:
        """Raises ConfigError for a setting that watch() would refuse, or for what is no logger."""
        configuration.from_settings(settings, {})
        self._settings = dict(settings)
        self._log_to = log_to
        self._log_every_s = log_every_s
        self._watch: Watch | None = None
        if log_to is not None:
            from torchlens_perf.results.figures import checked

            checked(log_to, log_every_s, None)

    @property
    def begun(self) -> bool:
        return self._watch is not None

    def begin(
        self, model: Any = None, step: Callable[[], int] | None = None, *, total_steps: int = 0, log_to: object = None
    ) -> None:
        """Training begins; a run that was left by an exception is ended first.

        model: as watch() takes it. step: the framework's number of the step in progress, for loggers; with it, step()
        alone ends a step. total_steps: that there will be; 0: not known. log_to: besides what the user has passed.
        """
        self.end()
        with guard("beginning a run of a framework"):
            config = self._settings.get("config") or Config()
            config = dataclasses.replace(config, _total_steps=max(0, total_steps))
            watched = self._watch = watch(model, **{**self._settings, "config": config}).start()
            if step is not None:
                watched.steps_by_hand()
            for each in (self._log_to, log_to):
                if each is not None:
                    watched.log_to(each, every_s=self._log_every_s, step=step)

    def step(self) -> None:
        if self._watch is not None:
            self._watch.step()

    def tag(self, what: str) -> None:
        """See Watch.tag()."""
        if self._watch is not None:
            with guard("tagging a step"):
                self._watch.tag(what)

    def end(self) -> None:
        """Training has ended, also by an exception; again is harmless. Rank 0 shows its report."""
        watched, self._watch = self._watch, None
        if watched is not None:
            with guard("ending a run of a framework"):
                watched.stop()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watch": None, "_log_to": None}


def missing(framework: str, error: ImportError) -> ConfigError:
    """A framework that is not there, as one clear line."""
    return ConfigError(f"{framework} cannot be imported: {error}. Next: pip install {framework}")
