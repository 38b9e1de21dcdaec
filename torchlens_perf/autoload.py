"""Record scripts without changing them.

::

    torchrun --logs-specs torchlens_perf train.py    torchrun.py sets TORCHLENS_PERF=1 in the workers
    TORCHLENS_PERF=1 python train.py                 torch calls autoload(), an entry point
    python -m torchlens_perf run train.py ARGS       the same, also if torch loads no entry points

Recording starts after the first training step (hooks/loop/first_step.py), because data loader
workers, compile workers, launchers and tools import torch too and are not ranks.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchlens_perf.watching import Watch

AUTOLOAD_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_started: Watch | None = None


def is_autoload_off(environ: Mapping[str, str]) -> bool:
    """Return True if torch does not load entry points: for any value of the switch but "1"
    (torch.__init__).
    """
    return environ.get(AUTOLOAD_SWITCH, "1") != "1"


def autoload(imported: str = "torch") -> None:
    """Entry point `torch.backends`. It never raises, as that would make `import torch` fail.

    imported: the module that was imported, torch or openai.
    """
    # torch calls this function in every process of an environment with this package. Most of them
    # must not pay for the imports below. This is config.SWITCH.
    if "TORCHLENS_PERF" in os.environ and imported == "torch":
        _autoload_if_switched_on()
    # This is roles.recording.ROLE. Libraries of such a process record events, and those of one that
    # asks servers in a job with roles: it has imported openai (startup/sitecustomize.py).
    if "TORCHLENS_PERF_ROLE" in os.environ or (
        "TORCHLENS_PERF_RUN_ID" in os.environ and "torch" not in sys.modules
    ):
        importlib.import_module("torchlens_perf.roles.libraries").attach()


def _autoload_if_switched_on() -> None:
    from torchlens_perf import config
    from torchlens_perf.errors import ConfigError, guard

    try:
        with guard("arming at `import torch`"):
            if config.is_recording_switched_on(os.environ):
                arm()
    except ConfigError as error:
        _print_not_recording(str(error))


def arm() -> None:
    """Start a watch when this process's next step has ended. Further calls do nothing.

    Raise ConfigError for an invalid TORCHLENS_PERF_* variable.
    """
    from torchlens_perf import config
    from torchlens_perf.errors import guard
    from torchlens_perf.hooks.collectives import nccl_plugin
    from torchlens_perf.hooks.loop import first_step
    from torchlens_perf.recorder.recorder import find_recording_obstacle

    obstacle = find_recording_obstacle()
    if obstacle is not None:
        if first_step.is_user_program():
            _print_not_recording(str(obstacle))
        return
    environment = config.from_environment(os.environ)
    _rearm_in_children()
    with guard("offering NCCL the plugin"):
        if environment.get("collectives", config.Config.collectives):
            nccl_plugin.offer_at_import(os.environ, environment.get("nccl", config.Config.nccl))

    first_step.call_after_first_step(_start_watch)


def disarm() -> None:
    """Stop waiting for a step, and end the watch that was started here.

    Further calls do nothing.
    """
    global _started
    waiting = sys.modules.get("torchlens_perf.hooks.loop.first_step")
    if waiting is not None:
        waiting.stop_waiting_for_first_step()
    started, _started = _started, None
    if started is not None:
        started.stop()


def _start_watch(optimizer: Any) -> None:
    global _started
    from torchlens_perf.errors import ConfigError
    from torchlens_perf.watching import start_after_first_step

    try:
        _started = start_after_first_step(optimizer)
    except ConfigError as error:
        # An invalid variable must not stop a script.
        _print_not_recording(str(error))


@functools.cache
def _rearm_in_children() -> None:
    """Wait for a step in forked children of a recorded process, which may train too."""
    # The handler of watching.py, which clears what the child has inherited, must run before.
    from torchlens_perf.watching import forked_while_recording

    os.register_at_fork(after_in_child=lambda: autoload() if forked_while_recording() else None)


# Cached, because the entry point and `run` both call autoload(), and the line must appear once.
@functools.cache
def _print_not_recording(reason: str) -> None:
    from torchlens_perf.errors import print_off
    from torchlens_perf.watching import already_printed

    already_printed.add(reason)
    print_off(reason, os.environ)
