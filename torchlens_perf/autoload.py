"""Recording a script that does not know of us.

::

    torchrun --logs-specs torchlens_perf train.py      torchrun.py sets TORCHLENS_PERF=1 for the workers
    TORCHLENS_PERF=1 python train.py                   autoload(): entry point torch.backends, at `import torch`
    python -m torchlens_perf run train.py ARGS         commands/run.py: the same, also where torch loads no entry points

In a worker nothing happens until something trains (hooks/loop/first_step.py): data loader workers, compile workers,
launchers and tools import torch too, and are not ranks.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

from torchlens_perf import config as configuration
from torchlens_perf.config import Config
from torchlens_perf.errors import ConfigError, guard, printable
from torchlens_perf.output import say
from torchlens_perf.watch import Watch, already_printed, forked_while_recording, start_after_first_step

AUTOLOAD_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_started: Watch | None = None


def is_autoload_off(environ: Mapping[str, str]) -> bool:
    """Whether torch loads no entry points: with any value but "1" (torch.__init__)."""
    return environ.get(AUTOLOAD_SWITCH, "1") != "1"


def autoload() -> None:
    """Entry point `torch.backends`. Never raises: that would make `import torch` itself fail."""
    try:
        with guard("arming at `import torch`"):
            if configuration.is_on(os.environ):
                arm()
    except ConfigError as error:
        _say_off(str(error))


def arm() -> None:
    """Waits for this process's next step, and starts a watch at its end. Again is harmless.

    Raises ConfigError for a bad TORCHLENS_PERF_* variable.
    """
    environment = configuration.from_environment(os.environ)
    from torchlens_perf.hooks.loop import first_step
    from torchlens_perf.recorder import nccl_plugin

    with guard("offering NCCL the plugin"):
        if environment.get("collectives", Config.collectives):
            nccl_plugin.offer_early(os.environ, environment.get("nccl", Config.nccl))

    first_step.wait(_start)


def disarm() -> None:
    """Waits no longer, and ends the watch that was started here. Again is harmless."""
    global _started
    waiting = sys.modules.get("torchlens_perf.hooks.loop.first_step")
    if waiting is not None:
        waiting.stop_waiting()
    started, _started = _started, None
    if started is not None:
        started.stop()


def _start(optimizer: Any) -> None:
    global _started
    try:
        _started = start_after_first_step(optimizer)
    except ConfigError as error:
        _say_off(str(error))  # a setting in the environment is no reason to stop a script that does not know of us


def _again_in_child() -> None:
    """A child of a recorded process may be a trainer too: it waits for a step of its own."""
    if forked_while_recording():
        autoload()


# After watch.py's own, which is imported first: what was inherited has been taken away then.
os.register_at_fork(after_in_child=_again_in_child)


@functools.cache  # once, though torch's entry point and `run` both call autoload()
def _say_off(reason: str) -> None:
    already_printed.add(reason)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one line a node, not one a rank
        say(f"torchlens_perf is off: {printable(reason)}\n")
