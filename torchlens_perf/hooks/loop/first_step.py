"""Start a watch at the first training step of an unmodified program (autoload.py).

Data loader workers, compile workers, launchers and tools also import torch, but are not ranks.
Nothing is therefore created until the process trains. A program that created a model but never
trained prints one line at its exit.
"""

from __future__ import annotations

import atexit
import gc
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
from torchlens_perf.hooks.loop.trained_models import has_optimizer_class
from torchlens_perf.output import write_to_stderr
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.patch import patched
from torchlens_perf.run.file_checks import resolve_links

Start = Callable[[Any], None]
"""Function whose argument is the optimizer that has just stepped, or None without an optimizer."""


class FirstStepTrigger:
    """Trigger that calls `start` once, after the first optimizer step.

    In a program without optimizers, a backward pass triggers the call. One trigger per process is
    installed while torch is imported. The trigger removes itself before it calls `start`.
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
        """Install the hooks. This method must not be called inside an optimizer's step."""
        relay.install_hooks()
        torch_private.make_dynamo_skip_package()
        relay.after = self._start_after_optimizer_step
        if torch_private.is_usable("torch.autograd._engine_run_backward"):
            self._patch_backward_to_count()
        atexit.register(self._print_if_nothing_recorded)

    def remove(self) -> None:
        if relay.after == self._start_after_optimizer_step:
            relay.after = None
        atexit.unregister(self._print_if_nothing_recorded)
        self._removed = True
        self._patches.close()

    def _start_after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        with guard("starting at the first optimizer step"):
            # The step may be compiled. Starting calls hundreds of functions.
            torch_private.call_without_dynamo(self._start_once, optimizer)

    def _start_once(self, optimizer: Any) -> None:
        stop_waiting_for_first_step()
        self._start(optimizer)

    def _patch_backward_to_count(self) -> None:
        import torch.autograd

        run_backward, thread = torch.autograd._engine_run_backward, self._thread

        def count_backward(*args: Any, **kwargs: Any) -> Any:
            if self._removed:
                return run_backward(*args, **kwargs)
            outer = getattr(thread, "open", 0)
            thread.open = outer + 1
            try:
                result = run_backward(*args, **kwargs)
            finally:
                thread.open = outer
            if not outer and not self._removed:
                self._start_after_backward()
            return result

        torch_private.break_graph_at(count_backward)
        self._patches.enter_context(patched(torch.autograd, "_engine_run_backward", count_backward))

    @guard("starting at a backward pass")
    def _start_after_backward(self) -> None:
        """Start after a backward pass if the process has no optimizer.

        One pass alone may belong to a program that does not train.
        """
        self._passes += 1
        if self._passes >= 2 and not has_optimizer_class():
            self._start_once(None)

    def _print_if_nothing_recorded(self) -> None:
        with guard("saying that nothing was recorded"):
            if os.getpid() == self._pid and is_user_program() and self._may_have_trained():
                write_to_stderr(
                    f"torchlens_perf recorded nothing: {self._explain_missing_step()}\n"
                )

    def _may_have_trained(self) -> bool:
        """Return True if a backward pass has run, or if a model or an optimizer exists.

        Other programs that import torch must not print anything in addition. All objects are
        searched for a model only here, after the end of the program.
        """
        from torch.nn import Module

        # isinstance() would read `__class__`, which may run code of a lazy proxy.
        return (
            self._passes > 0
            or has_optimizer_class()
            or any(issubclass(type(each), Module) for each in gc.get_objects())
        )

    def _explain_missing_step(self) -> str:
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


_waiting: FirstStepTrigger | None = None


def call_after_first_step(start: Start) -> None:
    """Call `start` at the end of this process's next step.

    Do nothing if the process already waits for its first step or is inside a watch.
    """
    global _waiting
    if _waiting is None and relay.after is None:
        _waiting = FirstStepTrigger(start)
        _waiting.install()


def stop_waiting_for_first_step() -> None:
    """Stop waiting for the first step, because a watch begins or this process is a forked child."""
    global _waiting
    waiting, _waiting = _waiting, None
    if waiting is not None:
        waiting.remove()


def is_user_program() -> bool:
    """Return True if the main program was written by the user.

    Return False in children of multiprocessing and in installed tools, such as launchers.
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
    # A .pth file or PYTHONPATH may add other environments, for example if torchrun is not in
    # torch's environment.
    folders += [
        entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")
    ]
    return not resolve_links(file).startswith(
        tuple(f"{resolve_links(folder)}{os.sep}" for folder in folders)
    )
