"""Automatic start of a watch at the first training step of an unmodified program (autoload.py).

Data loader workers, compile workers, launchers and tools import torch without being ranks. Nothing
is therefore created until the process trains. A program that had a model but never trained prints
one line at its end.
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
from torchlens_perf.hooks.loop.trained_models import living_optimizers, objects_of_type
from torchlens_perf.output import say
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.patch import patched

Start = Callable[[Any], None]
"""Receives the optimizer that has just stepped, or None after a backward pass without optimizer."""


class FirstStep:
    """Trigger that calls `start` once, after the first optimizer step.

    In a program without optimizers, a backward pass takes the place of the step. One object per
    process is installed while torch is imported. It removes itself before it calls `start`.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._patches = ExitStack()
        # `open` is the number of backward passes in progress on the thread.
        self._thread = threading.local()
        self._passes = 0  # Number of backward passes that have ended.
        self._pid = os.getpid()
        self._removed = False

    def install(self) -> None:
        """Install the hooks. Must not be called inside an optimizer's step."""
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
        """Start after a backward pass if the process has no optimizer.

        This is checked after 2, 4, 8, ... passes only, because searching for optimizers is slow.
        """
        self._passes += 1
        count = self._passes
        if count >= 2 and count & (count - 1) == 0 and not living_optimizers():
            stop_waiting()
            self._start(None)

    def _process_ends(self) -> None:
        with guard("saying that nothing was recorded"):
            if os.getpid() == self._pid and is_users_program() and self._looks_like_training():
                say(f"torchlens_perf recorded nothing: {self._explanation()}\n")

    def _looks_like_training(self) -> bool:
        """Return True if a backward pass has run, or a model or an optimizer exists.

        Other programs that import torch (`python -c "import torch; print(torch.__version__)"`) must
        produce their usual output and nothing else.
        """
        from torch.nn import Module

        return self._passes > 0 or bool(objects_of_type(Module)) or bool(living_optimizers())

    def _explanation(self) -> str:
        following = (
            "Next: for inference, or to mark yourself where a step ends, use perf.watch(model) in"
            " the script."
        )
        if self._passes > 1:
            following = (
                "Next: call w.step() at the end of your loop, inside of `with perf.watch(model) as"
                " w:`."
            )
        passes = f"{self._passes} backward pass{'es' if self._passes != 1 else ''}"
        return f"no optimizer's step was seen, and {passes}. {following}"


_waiting: FirstStep | None = None


def wait(start: Start) -> None:
    """Call `start` at the end of this process's next step.

    Does nothing if the process already waits or is inside a watch.
    """
    global _waiting
    if _waiting is None and relay.after is None:
        _waiting = FirstStep(start)
        _waiting.install()


def stop_waiting() -> None:
    """Stop waiting: a watch begins, or this is a forked child, which may wait again."""
    global _waiting
    waiting, _waiting = _waiting, None
    if waiting is not None:
        waiting.remove()


def is_users_program() -> bool:
    """Return True if the main program is the user's.

    Children of multiprocessing and installed tools, such as launchers, are excluded.
    """
    if multiprocessing.parent_process() is not None or os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return not hasattr(sys, "ps1")
    folders = [
        sysconfig.get_path(name)
        for name in ("scripts", "stdlib", "platstdlib", "purelib", "platlib")
    ]
    # A .pth file or PYTHONPATH may add other environments. torchrun and torch may be in different
    # ones.
    folders += [
        entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")
    ]
    return not os.path.realpath(file).startswith(
        tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)
    )
