"""Records what `opentelemetry-instrument` starts, as TORCHLENS_PERF=1 does: entry point `opentelemetry_instrumentor`.

::

    opentelemetry-instrument torchrun --nproc-per-node 8 train.py

opentelemetry-instrumentation is no dependency of ours. Its own loader imports this file, in every Python process that
is started so, before the program: torchrun, its workers, and whatever else they start. Torch is not imported here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, MutableMapping
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from torchlens_perf import autoload
from torchlens_perf.config import SWITCH, is_on
from torchlens_perf.errors import ConfigError, guard
from torchlens_perf.instrumentation.environment_variables import PREFIX
from torchlens_perf.startup.sitecustomize import AfterTorch


class TorchlensPerfInstrumentor(BaseInstrumentor):  # type: ignore[misc] # the library is not followed
    """Switches recording on in this process and its children. Never raises, whatever the environment says."""

    _switched_on = False

    def instrumentation_dependencies(self) -> Collection[str]:
        """None. "torch >= 2.11" would refuse 2.11.0a0 and the like, as the images of GPU vendors have it."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        with guard("switching on under opentelemetry-instrument"):
            take_options(os.environ)
            try:
                wanted = is_on(os.environ)
            except ConfigError:
                return  # whoever imports torch says so, once a node
            if wanted is None:
                os.environ[SWITCH] = "1"
                self._switched_on = True
            if wanted is False:
                return
            if "torch" in sys.modules:
                autoload.autoload()
            elif autoload.is_autoload_off(os.environ):
                sys.meta_path.insert(0, AfterTorch())  # torch does not load our entry point

    def _uninstrument(self, **kwargs: Any) -> None:
        """Ends the recording that began by itself. One that the program began with watch() goes on."""
        with guard("switching off what opentelemetry-instrument switched on"):
            if self._switched_on:
                os.environ.pop(SWITCH, None)
                self._switched_on = False
            autoload.disarm()


def take_options(environ: MutableMapping[str, str]) -> None:
    """Renames OTEL_PYTHON_TORCHLENS_PERF_X, which `opentelemetry-instrument --torchlens_perf_x` sets. They win."""
    for name in [name for name in environ if name.startswith(PREFIX)]:
        environ[name.removeprefix("OTEL_PYTHON_")] = environ.pop(name)
