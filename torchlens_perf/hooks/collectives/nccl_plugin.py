"""Find our profiler plugin for NCCL (native/nccl_profiler.c), offer it to NCCL, and control it.

NCCL loads the plugin at the first communicator, so the environment variable must be set before
`init_process_group`. A different plugin that the job has chosen is kept.
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

from torchlens_perf.interruption import ours
from torchlens_perf.run import ownership

VARIABLE = "NCCL_PROFILER_PLUGIN"
OLDEST_NCCL = (2, 28)
SAMPLED_EVERY = 50
"""Interval of timed steps with versions of NCCL for which timing is costly.
"""
POOL_BYTES = 34 << 20
"""Shared memory that NCCL allocates per process and communicator once it times kernels.
"""
_SHARED_MEMORY = Path("/dev/shm")
_MODULE = "_nccl_profiler"
# NCCL truncates longer paths.
_LONGEST_PATH = 254
# The plugin's library that NCCL searches for by default.
_BY_NAME = "libnccl-profiler.so"
_SYSTEM_FOLDERS = (
    "/usr/local/lib",
    "/usr/lib",
    "/usr/lib64",
    f"/usr/lib/{platform.machine()}-linux-gnu",
)
_CAPSULE = b"torchlens_perf._native.collective_marks"


class GiveUpCause(IntEnum):
    """Reasons why timing of kernels has ended in this process, in the order of
    native/nccl_mask.h."""

    NOT_GIVEN_UP = 0
    CAPTURED_OPERATION = 1
    SELF_COPY = 2
    IMPOSSIBLE_TIME = 3
    UNSEEN_GRAPH = 4
    MANY_COMMUNICATORS = 5
    NO_ROOM = 6


class PluginCounters(NamedTuple):
    """Counters of the plugin since it was loaded, in the order of native/nccl_operations.h."""

    communicators: int
    elsewhere: int
    """Operations that were not issued by a recorded call of torch.distributed."""
    crowded: int
    """Collectives of torch beyond 64 in one NCCL group."""
    lost: int
    stale: int
    given_up: int
    """The GiveUpCause of the end of timing, or 0."""


class NcclPlugin:
    """The plugin's library in this process, which NCCL loads too."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._attach = library.torchlens_perf_nccl_attach
        self._attach.argtypes = [ctypes.c_void_p]
        self._switch = library.torchlens_perf_nccl_switch
        self.note_unseen_graph = library.torchlens_perf_nccl_unseen_graph
        """Notes that the job replays a CUDA graph whose operations were not captured in a watch."""
        self.reset_after_fork = library.torchlens_perf_nccl_forked
        """Resets the plugin in a forked child, where the parent's operations never end."""
        self._counters = library.torchlens_perf_nccl_counters
        self._values = (ctypes.c_uint64 * len(PluginCounters._fields))()

    def attach(self) -> bool:
        """Start recording NCCL's reports.

        Return False if the plugin was built for another version of the recorder.
        """
        from torchlens_perf.recorder.recorder import collective_marks

        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype = ctypes.c_void_p
        pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
        return bool(self._attach(pointer_of(collective_marks(), _CAPSULE)))

    def detach(self) -> None:
        self._attach(None)

    def switch_timing(self, *, on: bool) -> None:
        """Switch timing of later NCCL kernels on or off. After a GiveUpCause, it stays off."""
        self._switch(int(on))

    def counters(self) -> PluginCounters:
        self._counters(self._values)
        return PluginCounters(*self._values)


def find_plugin_file() -> Path | None:
    """Return the plugin's file, or None if find_plugin_problem() returns a problem."""
    return None if find_plugin_problem() else _plugin_file()


def find_plugin_problem() -> str:
    """Return why NCCL cannot load the plugin, or ""."""
    found = _plugin_file()
    try:
        refused = ownership.why_others_can_change(found)
    except ours(OSError):
        return "the plugin was not built"
    if refused is not None:
        return f"the plugin is not used: {refused}"
    return (
        "" if len(os.fsencode(found)) <= _LONGEST_PATH else "the plugin's path is too long for NCCL"
    )


def _plugin_file() -> Path:
    return (
        Path(__file__).absolute().parents[2] / f"{_MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    )


@functools.cache
def load_plugin() -> NcclPlugin | None:
    """Return the plugin, or None if it is missing."""
    found = find_plugin_file()
    return None if found is None else NcclPlugin(found)


def read_nccl_version() -> tuple[int, ...] | None:
    """Return the version of NCCL in torch, such as (2, 29, 7), or None without NVIDIA's NCCL.

    CUDA is not initialized.
    """
    import torch

    if (
        torch.version.cuda is None
        or not torch.distributed.is_available()
        or not torch.distributed.is_nccl_available()
    ):
        return None
    return tuple(number for number in torch.cuda.nccl.version() if isinstance(number, int))


def compute_timing_interval(nccl: tuple[int, ...], *, asked_for: bool) -> int:
    """Return the interval of timed steps, or 0 if no step is timed.

    asked_for: True to also time versions of NCCL for which timing may be slow
    (docs/internals/decisions).

    Timing costs 0.3 to 0.4 % with NCCL 2.28 to 2.30, and 10 % of a small all-reduce with 2.31
    (nccl#2355).
    """
    if OLDEST_NCCL <= nccl[:2] <= (2, 30):
        return 1
    return SAMPLED_EVERY if asked_for and nccl[:2] > OLDEST_NCCL else 0


def find_shared_memory_problem(local_ranks: int, shared_memory: Path = _SHARED_MEMORY) -> str:
    """Return why NCCL cannot time kernels of one communicator over all ranks of this node, or "".

    At the first timed kernel, NCCL allocates a pool in shared memory for each process and
    communicator. If the allocation fails, NCCL uses a null pointer:
    https://github.com/NVIDIA/nccl/pull/2326. The plugin repeats the check for later communicators.
    """
    needed = local_ranks * POOL_BYTES
    try:
        found = os.statvfs(shared_memory)
    except ours(OSError) as error:
        return (
            f"NCCL needs {needed >> 20} MiB of shared memory for it, and {shared_memory}:"
            f" {error.strerror}"
        )
    free = found.f_bavail * found.f_frsize
    if free >= needed:
        return ""
    return (
        f"NCCL needs {needed >> 20} MiB of shared memory for it, and {shared_memory} has"
        f" {free >> 20} MiB left"
    )


def find_other_plugin(environ: Mapping[str, str], file: Path) -> str | None:
    """Return the plugin that the job has chosen, or None.

    The plugin may be set by variable or configuration file, or have NCCL's default name."""
    chosen = environ.get(VARIABLE)
    if chosen is not None:
        # A plugin of this package is not "other", even if it is from another environment.
        is_plugin = chosen == str(file) or Path(chosen).name.startswith(f"{_MODULE}.")
        return None if is_plugin else f"{VARIABLE}={chosen}"
    own = environ.get("NCCL_CONF_FILE")
    for settings in (Path(own or os.path.expanduser("~/.nccl.conf")), Path("/etc/nccl.conf")):
        try:
            lines = settings.read_text(errors="replace").splitlines()
        except ours(OSError):
            continue
        if any(line.startswith(f"{VARIABLE}=") for line in lines):
            return f"{VARIABLE} in {settings}"
    folders = [*environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *_SYSTEM_FOLDERS]
    found = next(
        (
            Path(folder, _BY_NAME)
            for folder in folders
            if folder and Path(folder, _BY_NAME).exists()
        ),
        None,
    )
    return None if found is None else str(found)


def offer_plugin(environ: MutableMapping[str, str], file: Path) -> str | None:
    """Set the plugin in the environment, for communicators that NCCL creates later.

    If the job has chosen another plugin, change nothing and return that plugin.
    """
    other = find_other_plugin(environ, file)
    if other is None:
        environ[VARIABLE] = str(file)
    return other


def withdraw_plugin(environ: MutableMapping[str, str], file: Path) -> None:
    """Remove the plugin from the environment, unless the variable has been changed."""
    if environ.get(VARIABLE) == str(file):
        del environ[VARIABLE]


def offer_at_import(environ: MutableMapping[str, str], wish: str) -> None:
    """Offer the plugin at `import torch`, before communicators exist. wish: Config.nccl."""
    file, nccl = find_plugin_file(), None if wish == "off" else read_nccl_version()
    if (
        file is not None
        and nccl is not None
        and compute_timing_interval(nccl, asked_for=wish == "on")
    ):
        offer_plugin(environ, file)
