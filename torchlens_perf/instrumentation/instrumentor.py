"""Record programs started by `opentelemetry-instrument`: entry point `opentelemetry_instrumentor`.

::

    opentelemetry-instrument torchrun --nproc-per-node 8 train.py

opentelemetry-instrumentation is not a dependency. Its loader imports this file before the program
starts, in every Python process: torchrun, its workers and their child processes. This file does not
import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, MutableMapping
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from torchlens_perf import autoload
from torchlens_perf.config import SWITCH, is_recording_switched_on
from torchlens_perf.errors import ConfigError, guard
from torchlens_perf.instrumentation.environment_variables import PREFIX
from torchlens_perf.startup.sitecustomize import TorchImportHook


class TorchlensPerfInstrumentor(BaseInstrumentor):  # type: ignore[misc] # the library is not followed
    """Instrumentor that switches recording on in this process and its children.

    Its methods never raise exceptions, even if the environment is invalid.
    """

    _switched_on = False

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return no requirements. "torch >= 2.11" would exclude versions such as 2.11.0a0, which
        images of GPU vendors contain.
        """
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        with guard("switching on under opentelemetry-instrument"):
            rename_option_variables(os.environ)
            try:
                wanted = is_recording_switched_on(os.environ)
            except ConfigError:
                # The process that imports torch logs the error.
                return
            if wanted is None:
                os.environ[SWITCH] = "1"
                self._switched_on = True
            if wanted is False:
                return
            if "torch" in sys.modules:
                autoload.autoload()
            elif autoload.is_autoload_off(os.environ):
                # torch will not load this package by its entry point, so wait for torch's import.
                sys.meta_path.insert(0, TorchImportHook())

    def _uninstrument(self, **kwargs: Any) -> None:
        """End the recording that this instrumentor started. A recording of watch() continues."""
        with guard("switching off what opentelemetry-instrument switched on"):
            if self._switched_on:
                os.environ.pop(SWITCH, None)
                self._switched_on = False
            autoload.disarm()


def rename_option_variables(environ: MutableMapping[str, str]) -> None:
    """Rename each variable OTEL_PYTHON_TORCHLENS_PERF_X to TORCHLENS_PERF_X.

    An existing value of TORCHLENS_PERF_X is replaced.
    """
    for name in [name for name in environ if name.startswith(PREFIX)]:
        environ[name.removeprefix("OTEL_PYTHON_")] = environ.pop(name)
