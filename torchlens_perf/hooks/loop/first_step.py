"""Waiting, in a process that does not know of us, for the first step of its loop: see autoload.py.

Data loader workers, compile workers, launchers and tools import torch too, and are not ranks: until something trains,
nothing is made. Where a program with a model has trained nothing when it ends, one line says so.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torchlens_perf.errors import guard
from torchlens_perf.hooks.loop.optimizer import relay
from torchlens_perf.hooks.loop.trained_models import living, living_optimizers
from torchlens_perf.output import say
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.patch import patched

Start = Callable[[Any], None]
"""Gets the optimizer that has just stepped; None where a loop without one has made a backward pass."""


class FirstStep:
    """Calls `start` once: at the end of the first optimizer's step, or of a backward pass where there is no optimizer.

    Installed while torch is imported, and gone when it has called. One for a process.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._patches = ExitStack()
        self._thread = threading.local()  # open: its backward passes in progress
        self._passes = 0  # that have ended
        self._pid = os.getpid()
        self._removed = False

    def install(self) -> None:
        """Not from inside of an optimizer's step."""
        relay.install()
        relay.after = self._optimizer_stepped
        if torch_private.works("torch.autograd._engine_run_backward"):
            self._count_backwards()
        atexit.register(self._process_ends)

    def remove(self) -> None:
        if relay.after == self._optimizer_stepped:
            relay.after = None
        atexit.unregister(self._process_ends)
        self._removed = True
        self._patches.close()

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        stop_waiting()
        with guard("starting at the first optimizer step"):
            self._start(optimizer)

    def _count_backwards(self) -> None:
        import torch.autograd

        run_backward, thread = torch.autograd._engine_run_backward, self._thread

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._removed:
                return run_backward(*args, **kwargs)
            outer = getattr(thread, "open", 0)
            thread.open = outer + 1
            try:
                result = run_backward(*args, **kwargs)
            finally:
                thread.open = outer
            if not outer and not self._removed:
                self._backward_ended()
            return result

        torch_private.break_in_compiled_code(counted)
        self._patches.enter_context(patched(torch.autograd, "_engine_run_backward", counted))

    @guard("starting at a backward pass")
    def _backward_ended(self) -> None:
        """After the second one, and then ever more rarely: looking for optimizers takes long."""
        self._passes += 1
        count = self._passes
        if count >= 2 and count & (count - 1) == 0 and not living_optimizers():
            stop_waiting()
            self._start(None)

    def _process_ends(self) -> None:
        with guard("saying that nothing was recorded"):
            if os.getpid() == self._pid and is_users_program() and self._looks_like_training():
                say(f"torchlens_perf recorded nothing: {self._seen()}\n")

    def _looks_like_training(self) -> bool:
        """Whether there was a backward pass, or a model or an optimizer is left. A program may import torch for less.

        Such a program (`python -c "import torch; print(torch.__version__)"`) must write what it writes without us.
        """
        from torch.nn import Module

        return self._passes > 0 or bool(living(Module)) or bool(living_optimizers())

    def _seen(self) -> str:
        following = "Next: for inference, or to say yourself where a step ends, use perf.watch(model) in the script."
        if self._passes > 1:
            following = "Next: call w.step() at the end of your loop, inside of `with perf.watch(model) as w:`."
        passes = f"{self._passes} backward pass{'es' if self._passes != 1 else ''}"
        return f"no optimizer's step was seen, and {passes}. {following}"


_waiting: FirstStep | None = None


def wait(start: Start) -> None:
    """Waits for this process's next step, and calls `start` at its end. Again, or inside of a watch, is harmless."""
    global _waiting
    if _waiting is None and relay.after is None:
        _waiting = FirstStep(start)
        _waiting.install()


def stop_waiting() -> None:
    """A watch begins by itself, or this is a forked child, which may wait for a step of its own."""
    global _waiting
    waiting, _waiting = _waiting, None
    if waiting is not None:
        waiting.remove()


def is_users_program() -> bool:
    """Whether the main program is the user's: no child of multiprocessing, and no installed tool, as a launcher is."""
    if multiprocessing.parent_process() is not None or os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return not hasattr(sys, "ps1")
    folders = [sysconfig.get_path(name) for name in ("scripts", "stdlib", "platstdlib", "purelib", "platlib")]
    # Of other environments too, which a .pth file or PYTHONPATH adds: torchrun may be of the one, torch of the other.
    folders += [entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")]
    return not os.path.realpath(file).startswith(tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders))
