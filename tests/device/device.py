"""Builds and loads the asynchronous device, and plants times in it. See the package's docstring."""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

NAME = "asyncdev"
LONGER = "DEVICE_WORKS_LONGER"
_FOLDER = Path(__file__).parent
_BUILD = _FOLDER / "build"  # git ignores it
_MODULE = "_asyncdev"
# What takes longest to compile comes first.
_SOURCES = ("process_group", "operators", "bindings", "memory", "transport", "streams")
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-w", "-fvisibility=hidden", f"-DMODULE_NAME={_MODULE}"]
_TIMEOUT_S = 600
_AT_A_TIME = 2  # compilers


def missing() -> str | None:
    """What keeps the device from being built; None: nothing."""
    if shutil.which("g++") is None:
        return "there is no g++"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python's headers are missing"
    import torch

    if not (Path(torch.__file__).parent / "include" / "torch" / "library.h").is_file():
        return "torch came without its headers"
    added = torch._C._get_privateuse1_backend_name()
    if added not in ("privateuseone", NAME):
        return f"torch can have one added device, and has {added}"
    return None


def build() -> Path:
    """The device's file, for the torch and the sources at hand; compiles it where it is not there, in about 30 s.

    Processes that want it at once wait for the first one.
    """
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for path in sorted(_FOLDER.glob("*.cpp")) + sorted(_FOLDER.glob("*.h")):
        digest.update(path.name.encode() + path.read_bytes())
    built = _BUILD / f"{_MODULE}-{digest.hexdigest()[:12]}.so"
    if built.exists():
        return built
    _BUILD.mkdir(exist_ok=True)
    with open(_BUILD / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=_BUILD) as folder:
                _compile(Path(torch.__file__).parent, Path(folder)).rename(built)
    return built


def _compile(torch_folder: Path, folder: Path) -> Path:
    include, libraries = torch_folder / "include", torch_folder / "lib"
    headers = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    result = folder / f"{_MODULE}.so"
    waiting, running = list(_SOURCES), []
    while waiting or running:
        while waiting and len(running) < _AT_A_TIME:
            name = waiting.pop(0)
            command = ["g++", *_FLAGS, *(f"-I{each}" for each in headers), "-c", f"{_FOLDER / name}.cpp"]
            running.append(subprocess.Popen([*command, "-o", f"{folder / name}.o"]))
        first = running.pop(0)
        if first.wait(_TIMEOUT_S):
            for each in running:
                each.wait(_TIMEOUT_S)
            raise RuntimeError(f"the device does not compile: {first.args}")
    objects = [f"{folder / name}.o" for name in _SOURCES]
    links = [f"-L{libraries}", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-lc10", f"-Wl,-rpath,{libraries}"]
    subprocess.run(["g++", "-shared", "-o", str(result), *objects, *links], check=True, timeout=_TIMEOUT_S)
    return result


@functools.cache
def load() -> Any:
    """Makes the device torch's accelerator, as `torch.asyncdev`, with its process group as the backend `asyncdev`.

    Returns the extension. In a process that does not fork afterwards: the streams' threads are not in its children.
    """
    import torch

    path = str(build())
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, path)
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None
    extension = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(extension.shut_down)
    if torch.distributed.is_available():

        def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            return extension.create_process_group(store, rank, size, timeout.total_seconds())

        torch.distributed.Backend.register_backend(NAME, create, devices=[NAME])
    return extension


def _device_module() -> types.ModuleType:
    """What torch, DDP and FSDP ask `torch.<device>` for."""
    import torch

    class Stream(torch.Stream):
        """One of its own, whatever its priority."""

        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
            if given:
                return super().__new__(cls, **given)
            return super().__new__(cls, torch.device(NAME, 0), priority=priority)

    class Event(torch.Event):
        """As torch.cuda.Event: without timing unless asked for."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return super().__new__(cls, torch.device(NAME, 0), enable_timing=enable_timing)

    generator = torch.Generator(NAME)  # each is the device's one
    module = types.ModuleType(f"torch.{NAME}")
    functions: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def spin(seconds: float) -> None:
    """A kernel on the current stream that takes so long, times the slowness, and times LONGER in the environment."""
    load().spin_ns(round(seconds * longer() * 1e9))


def longer() -> float:
    """How much longer this process lets the device work, see tests/support/device_ranks.py."""
    return float(os.environ.get(LONGER, "1"))


def never() -> Callable[[], None]:
    """Start a kernel on the current stream that runs until the returned function is called."""
    number = load().never()
    return lambda: load().release(number)


def call(stream: int, function: Callable[[int], object]) -> None:
    """A kernel in Python on a stream, by its id: called with the time, in ns, that the stream has come to there."""
    load().call(stream, function)


def set_kernel_time(seconds: float) -> None:
    """What each operator takes that is issued from now on; 20 us at first."""
    load().set_kernel_ns(round(seconds * 1e9))


def set_computing(computes: bool) -> None:
    """Whether kernels compute. Without it they take no CPU time, as on a GPU, and their results are undefined."""
    load().set_computing(computes)


def set_slowness(factor: float) -> None:
    """Makes the kernels that are issued from now on take so many times as long; collectives are not kernels."""
    load().set_slowness(factor)


def set_collective_time(latency_s: float, bytes_per_second: float = 10e9) -> None:
    """What collectives that are issued from now on take, once all ranks have come to them. The same on all ranks."""
    load().set_collective(round(latency_s * 1e9), bytes_per_second)


def counters() -> dict[str, int]:
    """How often the host has done what since the process began."""
    return dict(load().counters())


def synchronizations() -> int:
    """How often the host has waited for the device, in whatever way; not for room in a stream's queue."""
    return sum(count for name, count in counters().items() if name.endswith("synchronizations"))
