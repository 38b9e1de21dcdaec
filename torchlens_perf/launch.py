"""Recording a script that does not know of us.

::

    torchrun --logs-specs torchlens_perf train.py      torchrun_flag.py sets TORCHLENS_PERF=1 for the workers
    TORCHLENS_PERF=1 python train.py                   autoload(): entry point torch.backends, at `import torch`
    python -m torchlens_perf run train.py ARGS         run_script(): the same, through an import hook

In a worker nothing but one optimizer hook is installed until an optimizer has stepped: data loader workers, compile
workers, launchers and tools import torch too, and are not ranks.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing.util
import os
import runpy
import sys
import types
from collections.abc import Sequence
from typing import Any

from torchlens_perf import config as configuration
from torchlens_perf.config import Config
from torchlens_perf.errors import ConfigError, TorchlensPerfError, guard

AUTOLOAD_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def autoload() -> None:
    """Entry point `torch.backends`. Never raises: that would make `import torch` itself fail."""
    try:
        with guard("arming at `import torch`"):
            if configuration.is_on(os.environ):
                arm()
    except ConfigError as error:
        _say_off(error)


def arm() -> None:
    """Waits for this process's next optimizer step, and starts a watch at its end. Again is harmless.

    Raises ConfigError for a bad TORCHLENS_PERF_* variable.
    """
    told = configuration.from_environment(os.environ)
    from torchlens_perf import nccl_plugin
    from torchlens_perf.hooks.optimizer import relay

    with guard("offering NCCL the plugin"):
        if told.get("collectives", Config.collectives):
            nccl_plugin.offer_early(os.environ, told.get("nccl", Config.nccl))

    def first_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        relay.after = None
        with guard("starting at the first optimizer step"):
            _start(optimizer)

    if relay.after is None:
        relay.install()
        relay.after = first_step


def _start(optimizer: Any) -> None:
    from torchlens_perf.watch import watch

    started = watch()
    try:
        if not started.start(after_step_of=optimizer):
            return
    except ConfigError as error:
        _say_off(error)  # a setting in the environment is no reason to stop a script that does not know of us
        return
    # A process that multiprocessing forked ends without atexit, but with its own finalizers.
    atexit.register(started.close)
    multiprocessing.util.Finalize(None, started.close, exitpriority=100)


def _say_off(error: TorchlensPerfError) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one line a node, not one a rank
        print(f"torchlens_perf is off: {error}", file=sys.stderr)


def run_script(arguments: Sequence[str]) -> None:
    """Runs `script.py ARGS` or `-m module ARGS` as `python` would, recorded. Raises what the script raises."""
    os.environ[configuration.SWITCH] = "1"
    if "torch" in sys.modules:
        autoload()
    else:
        # The script may set variables before it imports torch, so we must not import it first.
        sys.meta_path.insert(0, _AfterTorch())
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = arguments[0]
    sys.argv = list(arguments)
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    # A real __main__ module: classes defined in it can be pickled, and spawned children import it again.
    main = types.ModuleType("__main__")
    main.__file__ = script
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Calls autoload() when torch has been imported. Works also where torch's own autoload is switched off."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_arm(module: types.ModuleType) -> None:
                load(module)
                autoload()

            spec.loader.exec_module = load_and_arm  # type: ignore[method-assign]
        return spec
