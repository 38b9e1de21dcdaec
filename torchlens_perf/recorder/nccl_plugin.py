"""NCCL's profiler plugin (native/nccl_profiler.c): found, offered to NCCL by its environment variable, and switched.

NCCL loads it at the first communicator of the process. So it must be offered before `init_process_group`; whoever has
chosen another plugin keeps that one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sysconfig
from collections.abc import Mapping, MutableMapping
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from torchlens_perf.recorder import recorder
from torchlens_perf.run import ownership

VARIABLE = "NCCL_PROFILER_PLUGIN"
OLDEST_NCCL = (2, 27)
SAMPLED_EVERY = 50
"""Steps of which one is timed where NCCL pays for it, see steps_between()."""
POOL_BYTES = 34 << 20
"""Of shared memory, that NCCL takes for one process and communicator once it times kernels: 33 MiB and some more."""
_SHARED_MEMORY = Path("/dev/shm")
_MODULE = "_nccl_profiler"
_LONGEST_PATH = 254  # NCCL cuts the rest
_BY_NAME = "libnccl-profiler.so"  # the library that NCCL looks for without a setting
_SYSTEM_FOLDERS = ("/usr/local/lib", "/usr/lib", "/usr/lib64", f"/usr/lib/{platform.machine()}-linux-gnu")
_CAPSULE = b"torchlens_perf._native.collective_marks"


class Cause(IntEnum):
    """Why nothing is timed any more in this process; in the order of native/nccl_mask.h."""

    NOT_GIVEN_UP = 0
    CAPTURED_OPERATION = 1
    SELF_COPY = 2
    IMPOSSIBLE_TIME = 3
    CAPTURE_BEGAN = 4
    """With an NCCL that does not report what is captured."""
    UNSEEN_GRAPH = 5
    MANY_COMMUNICATORS = 6
    NO_ROOM = 7


class Counters(NamedTuple):
    """What the plugin has counted since it was loaded; in the order of native/nccl_operations.h."""

    communicators: int
    elsewhere: int
    """Operations that were not issued by a recorded call of torch.distributed."""
    unnamed: int
    """Nor launched in one, where NCCL does not report the call (2.27): in a group, or elsewhere."""
    crowded: int
    """Collectives of torch in one group of NCCL with more than 64 others."""
    lost: int
    stale: int
    given_up: int
    """A Cause, which stays."""


class NcclPlugin:
    """The plugin in this process: the same library as NCCL's, if NCCL has loaded it."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._attach = library.torchlens_perf_nccl_attach
        self._attach.argtypes = [ctypes.c_void_p]
        self._switch = library.torchlens_perf_nccl_switch
        self._capture_begins = library.torchlens_perf_nccl_capture_begins
        self._unseen_graph = library.torchlens_perf_nccl_unseen_graph
        self._forked = library.torchlens_perf_nccl_forked
        self._counters = library.torchlens_perf_nccl_counters
        self._values = (ctypes.c_uint64 * len(Counters._fields))()

    def attach(self) -> bool:
        """From here on it records what NCCL reports. False where it was built for another version of the recorder."""
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        return bool(self._attach(pointer_of(recorder.collective_marks(), _CAPSULE)))

    def detach(self) -> None:
        self._attach(None)

    def switch(self, *, on: bool) -> None:
        """Whether NCCL times its kernels, from the next one on; never again once that was given up."""
        self._switch(int(on))

    def capture_begins(self) -> None:
        self._capture_begins()

    def unseen_graph(self) -> None:
        """A CUDA graph will be replayed, of which it is not known what it holds."""
        self._unseen_graph()

    def forked(self) -> None:
        """In a child process: what is under way is the parent's, and nothing is timed."""
        self._forked()

    def counters(self) -> Counters:
        self._counters(self._values)
        return Counters(*self._values)


def path() -> Path | None:
    """The plugin's file; None where problem() says why it is not used."""
    return None if problem() else _file()


def problem() -> str:
    """Why there is no plugin for NCCL to load; "" if there is one."""
    found = _file()
    try:
        refused = ownership.others_can_change(found)
    except OSError:
        return "the plugin was not built"
    if refused is not None:
        return f"the plugin is not used: {refused}"
    return "" if len(os.fsencode(found)) <= _LONGEST_PATH else "the plugin's path is too long for NCCL"


def _file() -> Path:
    return Path(__file__).absolute().parents[1] / f"{_MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"


@functools.cache
def load() -> NcclPlugin | None:
    """The plugin; None where it, or the native recorder that it records with, is not there."""
    found = path() if recorder.NATIVE else None
    return None if found is None else NcclPlugin(found)


def version() -> tuple[int, ...] | None:
    """NCCL's, (2, 29, 7), of the torch at hand; None for a torch without NVIDIA's NCCL. Does not initialize CUDA."""
    import torch

    if torch.version.cuda is None or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    reported = torch.cuda.nccl.version()
    return tuple(number for number in reported if isinstance(number, int))


def steps_between(nccl: tuple[int, ...], *, asked_for: bool) -> int:
    """Of so many steps one is timed; 1: each of them. 0: none. asked_for: also with an NCCL of which it is not known
    that timing harms nothing, see docs/internals/decisions/0042-nccl-timing.md.

    Others report that timing costs 0.3 to 0.4 % with 2.28 to 2.30, and 10 % of a small all-reduce with 2.31
    (nccl#2355); 2.27 ran out of room in its proxy under all-to-all (nccl#2039).
    """
    if (2, 28) <= nccl[:2] <= (2, 30):
        return 1
    return SAMPLED_EVERY if asked_for and nccl[:2] >= OLDEST_NCCL else 0


def no_room(local_ranks: int, shared_memory: Path = _SHARED_MEMORY) -> str:
    """Why NCCL cannot time the kernels of one communicator of all ranks of this node; "" if it can.

    The first timed kernel makes NCCL allocate a pool in shared memory for each process and communicator. Where that
    fails, NCCL uses a null pointer: https://github.com/NVIDIA/nccl/pull/2326. The plugin asks again at each later one.
    """
    needed = local_ranks * POOL_BYTES
    try:
        found = os.statvfs(shared_memory)
    except OSError as error:
        return f"NCCL needs {needed >> 20} MiB of shared memory for it, and {shared_memory}: {error.strerror}"
    free = found.f_bavail * found.f_frsize
    if free >= needed:
        return ""
    return f"NCCL needs {needed >> 20} MiB of shared memory for it, and {shared_memory} has {free >> 20} MiB left"


def other_plugin(environ: Mapping[str, str], file: Path) -> str | None:
    """The plugin that somebody else has chosen: in the environment, in one of NCCL's files of settings, or by a library
    of the name that NCCL looks for without a setting. None if nobody has."""
    chosen = environ.get(VARIABLE)
    if chosen is not None:
        # Also ours is that of another installation, whose launcher has started this process.
        ours = chosen == str(file) or Path(chosen).name.startswith(f"{_MODULE}.")
        return None if ours else f"{VARIABLE}={chosen}"
    own = environ.get("NCCL_CONF_FILE")
    for settings in (Path(own or os.path.expanduser("~/.nccl.conf")), Path("/etc/nccl.conf")):
        try:
            lines = settings.read_text(errors="replace").splitlines()
        except OSError:
            continue
        if any(line.startswith(f"{VARIABLE}=") for line in lines):
            return f"{VARIABLE} in {settings}"
    folders = [*environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *_SYSTEM_FOLDERS]
    found = next((Path(folder, _BY_NAME) for folder in folders if folder and Path(folder, _BY_NAME).exists()), None)
    return None if found is None else str(found)


def offer(environ: MutableMapping[str, str], file: Path) -> str | None:
    """Names the plugin to NCCL, for the communicators that are made from now on; again is harmless.

    Returns whose plugin stands in the way, and then leaves everything as it is.
    """
    other = other_plugin(environ, file)
    if other is None:
        environ[VARIABLE] = str(file)
    return other


def withdraw(environ: MutableMapping[str, str], file: Path) -> None:
    """Takes the plugin's name away again, if nobody has put another one there."""
    if environ.get(VARIABLE) == str(file):
        del environ[VARIABLE]


def offer_early(environ: MutableMapping[str, str], wish: str) -> None:
    """At `import torch`, for a recording that begins only when communicators have been made. wish: Config.nccl."""
    file, nccl = path(), None if wish == "off" else version()
    if file is not None and recorder.NATIVE and nccl is not None and steps_between(nccl, asked_for=wish == "on"):
        offer(environ, file)
