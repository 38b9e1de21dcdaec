"""Build and load the asynchronous device, and plant times in it.

The docstring of tests/device/__init__.py describes the device.
"""

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
# With the value "torch", device times are marked by torch's events, as on other accelerators than
# CUDA and HIP. By default, they are marked by the driver's.
EVENTS = "DEVICE_EVENTS"
_FOLDER = Path(__file__).parent
_BUILD = _FOLDER / "build"
_MODULE = "_asyncdev"
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-w", "-fvisibility=hidden", f"-DMODULE_NAME={_MODULE}"]
_TIMEOUT_S = 600


def missing() -> str | None:
    """Return the reason why the device cannot be built, or None."""
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
    """Return the device's library for this torch and these sources.

    A missing library is compiled in about 30 s. If several processes call this function, one
    compiles and the others wait.
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
    headers = [
        include,
        include / "torch" / "csrc" / "api" / "include",
        Path(sysconfig.get_path("include")),
    ]
    result = folder / f"{_MODULE}.so"
    # All sources include torch's headers, which take longest to compile: they are compiled once.
    together = folder / "all.cpp"
    together.write_text("".join(f'#include "{name}"\n' for name in sorted(_FOLDER.glob("*.cpp"))))
    links = [
        f"-L{libraries}",
        "-ltorch_cpu",
        "-ltorch",
        "-ltorch_python",
        "-lc10",
        f"-Wl,-rpath,{libraries}",
    ]
    includes = [f"-I{each}" for each in headers]
    command = ["g++", *_FLAGS, *includes, "-shared", "-o", str(result), str(together), *links]
    subprocess.run(command, check=True, timeout=_TIMEOUT_S)
    return result


@functools.cache
def load() -> Any:
    """Make the device torch's accelerator and register its process group as backend `asyncdev`.

    Return the extension, whose module is `torch.asyncdev`.

    The process must not fork afterwards, because children have no threads of the streams.
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
    if os.environ.get(EVENTS) != "torch":
        _mark_through_driver(path, extension)
    if torch.distributed.is_available():

        def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            return extension.create_process_group(store, rank, size, timeout.total_seconds())

        torch.distributed.Backend.register_backend(NAME, create, devices=[NAME])
    return extension


def _mark_through_driver(path: str, extension: Any) -> None:
    """Let watches mark the device through driver.cpp, as they do on a GPU."""
    from torchlens_perf.cuda import clock, device_times

    def create(_: object) -> Any:
        return clock.create_driver_clock(path, extension.current_stream, 0, extension.new_stream())

    device_times.create_clock = create


def _device_module() -> types.ModuleType:
    """Return the functions that torch, DDP and FSDP expect in `torch.<device>`."""
    import torch

    class Stream(torch.Stream):
        """A new stream of any priority."""

        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
            if given:
                return super().__new__(cls, **given)
            return super().__new__(cls, torch.device(NAME, 0), priority=priority)

    class Event(torch.Event):
        """An event like torch.cuda.Event, without timing by default."""

        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
        ) -> Any:
            return super().__new__(cls, torch.device(NAME, 0), enable_timing=enable_timing)

    generator = torch.Generator(NAME)  # All generators of the device share one state.
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
        "is_current_stream_capturing": lambda: load().is_capturing(),
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
    """Issue a kernel of the given duration to the current stream.

    The duration is multiplied by the slowness and by the environment variable LONGER.
    """
    load().spin_ns(round(seconds * longer() * 1e9))


def longer() -> float:
    """Return the factor for the durations of this process's kernels, see
    tests/support/device_ranks.py.
    """
    return float(os.environ.get(LONGER, "1"))


def start_endless_kernel() -> Callable[[], None]:
    """Start a kernel on the current stream that runs until the returned function is called."""
    number = load().never()
    return lambda: load().release(number)


def capture_graph(issue: Callable[[], object]) -> Callable[[], None]:
    """Capture the work that `issue` issues to the current stream, as torch.cuda.graph does.

    The work is not executed now. The returned function executes it with a single launch.
    """
    load().begin_capture()
    try:
        issue()
    finally:
        graph = load().end_capture()
    replay: Callable[[], None] = graph.replay
    return replay


def call(stream: int, function: Callable[[int], object]) -> None:
    """Issue a Python function as a kernel.

    stream: the stream's id. function: is called with the stream's device time in ns.
    """
    load().call(stream, function)


def set_kernel_time(seconds: float) -> None:
    """Set the duration of operators issued from now on. The default is 20 us."""
    load().set_kernel_ns(round(seconds * 1e9))


def set_computing(computes: bool) -> None:
    """Switch the computation of kernels on or off.

    Without computation, kernels use no CPU time, as on a GPU, and their results are undefined.
    """
    load().set_computing(computes)


def set_slowness(factor: float) -> None:
    """Multiply the duration of kernels issued from now on, but not of collectives."""
    load().set_slowness(factor)


def set_driver_costs(record_s: float, query_s: float, elapsed_s: float) -> None:
    """Set how long the host needs to record an event, to query it, and to read a time."""
    load().set_driver_costs(*(round(each * 1e9) for each in (record_s, query_s, elapsed_s)))


def set_outliers(every: int, factor: float) -> None:
    """Let one kernel of `every` take `factor` times longer, as if other programs used the device."""
    load().set_outliers(every, factor)


def set_collective_time(latency_s: float, bytes_per_second: float = 10e9) -> None:
    """Set how long later collectives take after the last rank has arrived, the same on all ranks."""
    load().set_collective(round(latency_s * 1e9), bytes_per_second)


def counters() -> dict[str, int]:
    """Return the numbers of the host's calls by kind since the process began."""
    return dict(load().counters())


def synchronizations() -> int:
    """Return the number of waits of the host for the device, except waits for room in a queue."""
    return sum(count for name, count in counters().items() if name.endswith("synchronizations"))
