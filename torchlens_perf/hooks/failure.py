"""Describe the exception that ends a watch: phase, module, and line of the program."""

from __future__ import annotations

import os
import sys
import time
import traceback
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard, printable
from torchlens_perf.interruption import ours
from torchlens_perf.run.failure import MAX_MESSAGE, Failure, is_about_lost_peer

if TYPE_CHECKING:
    from torch.nn import Module

# Files of torch whose functions run a phase, by the end of their path.
_PHASES = {
    ("torch/utils/data/dataloader.py", "__next__"): "data",
    ("torch/autograd/graph.py", "_engine_run_backward"): "backward",
    ("torch/optim/optimizer.py", "wrapper"): "optimizer",
    ("torch/nn/modules/module.py", "_call_impl"): "forward",
}


def current_exceptions() -> tuple[BaseException | None, ...]:
    """Return the exception that is being handled, and the one that ends the program.

    The interpreter stores an exception that nothing has caught before it calls exit handlers. In
    processes of multiprocessing, exit handlers run while the exception is being handled. A prompt
    goes on after an exception, so an exception that it has printed does not count.
    """
    is_prompt = hasattr(sys, "ps1") or "IPython" in sys.modules
    return sys.exc_info()[1], None if is_prompt else getattr(sys, "last_value", None)


def find_new_exception(earlier: tuple[BaseException | None, ...]) -> BaseException | None:
    """Return the current exception that is not one of current_exceptions() at an earlier time."""
    for error in current_exceptions():
        if error is not None and not any(error is each for each in earlier):
            return error
    return None


@guard("describing the exception that ended the run")
def describe_failure(error: BaseException | None, step: int) -> Failure | None:
    """Return what is known about the exception; None if it is no failure, such as Ctrl-C."""
    exit_code = None
    if isinstance(error, SystemExit):
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not exit_code:
            return None
        # A program that logs an exception may end with an exit code.
        error = error.__context__ if isinstance(error.__context__, Exception) else error
    if error is None or not isinstance(error, (Exception, SystemExit)):
        return None
    kind = type(error)
    frames, message = list(traceback.walk_tb(error.__traceback__)), _read_message(error)
    phase, module = _find_phase_and_module([frame for frame, _ in frames])
    return {
        "type": (
            kind.__qualname__
            if kind.__module__ == "builtins"
            else f"{kind.__module__}.{kind.__name__}"
        ),
        "message": printable(message)[:MAX_MESSAGE],
        "where": _find_place(frames),
        "step": step,
        "phase": phase,
        "module": module,
        "exit_code": exit_code,
        "lost_peer": is_about_lost_peer((each.__name__ for each in type(error).__mro__), message),
        "after_watch": False,
        "unix_ns": time.time_ns(),
    }


def _read_message(error: BaseException) -> str:
    """Return the text of an exception in one line; "" if it cannot be made."""
    try:
        return " ".join(str(error).split())
    except ours(Exception):
        # The text of an exception is made by code of the program.
        return ""


def _find_phase_and_module(frames: list[FrameType]) -> tuple[str, str]:
    """Return the phase that the exception left, and the innermost module of a forward pass."""
    phase, modules = "", list[Any]()
    for frame in frames:
        code = frame.f_code
        for (file, function), name in _PHASES.items():
            if code.co_name == function and code.co_filename.endswith(file):
                # Code of the forward pass also runs inside of the backward pass.
                phase = phase if phase == "backward" else name
                if name == "forward":
                    modules.append(frame.f_locals.get("self"))
    return phase, _name_of_module(modules[0], modules[-1]) if modules else ""


def _name_of_module(root: Module, inner: Module) -> str:
    """Return the qualified name of a module inside the model, or the class of the model."""
    from torchlens_perf.hooks import module_tree
    from torchlens_perf.hooks.loop.selection import unwrap_model

    _, model = unwrap_model(root)
    for name, module in module_tree.named_modules(model):
        if module is inner and name:
            return str(name)
    return str(type(model).__name__)


def _find_place(frames: list[tuple[FrameType, int]]) -> str:
    """Return the innermost line of code that does not belong to Python or an installed package."""
    import sysconfig

    from torchlens_perf.hooks.loop.selection import installed_package_folders

    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    python = map(sysconfig.get_path, ("stdlib", "platstdlib"))
    installed = (*installed_package_folders(), *(f"{path}/" for path in (*python, own)))
    for frame, line in reversed(frames):
        file = frame.f_code.co_filename
        if not file.startswith(("<", *installed)):
            return f"{os.path.basename(file)}:{line} in {frame.f_code.co_name}"
    return ""
