"""NCCL without a GPU, controlled from Python: fake_nccl.c, a copy of the plugin, and a real
recorder.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.collective_rig import CollectiveRig
from torchlens_perf.hooks.collectives import nccl_plugin
from torchlens_perf.hooks.collectives.nccl_plugin import NcclPlugin
from torchlens_perf.recorder.recorder import EndDetection
from torchlens_perf.run.ring import Flag

HERE = Path(__file__).parent
INTERFACES = {5: (2, 28, 9), 6: (2, 29, 7)}
# Event mask of P2p, CollApi and P2pApi.
SEEN = 4 | 512 | 1024
# Event mask of Coll and KernelCh.
TIMED = 2 | 64
ON = SEEN | TIMED
# Offset of the device's clock from the host's clock.
NCCL_S_CLOCK_NS = 1_700_000_000_000_000_000


def compile_nccl(target: Path, *flags: str) -> Path:
    """Compile fake_nccl.c. Raises CalledProcessError."""
    compiler = shutil.which("gcc") or "cc"
    command = [
        compiler,
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        *flags,
        "-o",
        str(target),
    ]
    command += [str(HERE / "fake_nccl.c"), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


class FakeNccl:
    """One NCCL with its own copy of the plugin, so each object has separate state."""

    def __init__(self, library: Path, folder: Path, interface: int) -> None:
        """Load NCCL. `library` is the file from compile_nccl(..., "-shared", "-fPIC").

        `interface` is the newest plugin interface that this NCCL supports.
        """
        built = nccl_plugin.find_plugin_file()
        assert built is not None
        self.file = folder / "plugin.so"
        own = folder / "libnccl.so"
        shutil.copy(built, self.file)
        shutil.copy(library, own)
        self.plugin = NcclPlugin(self.file)
        self.interface = interface
        self.library = ctypes.CDLL(str(own))
        for name in ("fake_communicator", "fake_call", "fake_collective"):
            getattr(self.library, name).restype = ctypes.c_void_p
        self.library.fake_call.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
        ]
        self.library.fake_collective.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        self.library.fake_group_end.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        self.library.fake_replay.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        times = [ctypes.c_uint64, ctypes.c_uint64]
        self.library.fake_kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *times]
        self.library.fake_kernel_began.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int,
            times[0],
        ]
        self.library.fake_kernel_ended.argtypes = [ctypes.c_void_p, ctypes.c_int, times[0]]
        self.library.fake_finalize.argtypes = [ctypes.c_void_p]
        for name in ("fake_number_works", "fake_progress", "fake_posted"):
            getattr(self.library, name).argtypes = [ctypes.c_void_p]
        self.library.fake_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *times]
        self.library.fake_cost_ns.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
        ]
        self.library.fake_cost_ns.restype = ctypes.c_double

    def load(self) -> int:
        """Load the plugin as for the first communicator. Return the chosen interface."""
        return int(self.library.fake_load(self.interface))

    def communicator(self, ranks: int = 2, rank: int = 0) -> int:
        """Create a communicator, and return the plugin's context for the communicator."""
        context = self.library.fake_communicator(ranks, rank)
        assert context
        return int(context)

    @property
    def mask(self) -> int:
        """Return the mask of events that NCCL reports."""
        return int(self.library.fake_mask())

    def __getattr__(self, name: str) -> Any:
        """Return the library's function fake_NAME for an attribute NAME."""
        return getattr(self.library, f"fake_{name}")


class NcclRig(CollectiveRig):
    """A recorder on the host's real clock, and an NCCL whose plugin writes to the recorder."""

    def __init__(self, folder: Path, library: Path, interface: int) -> None:
        rings = folder / "rings"
        rings.mkdir()
        super().__init__(rings, clock=None, capacity=1 << 14)
        self.nccl = FakeNccl(library, folder, interface)
        os.environ[nccl_plugin.VARIABLE] = str(self.nccl.file)
        try:
            assert self.nccl.load() == interface
        finally:
            del os.environ[nccl_plugin.VARIABLE]
        assert self.nccl.plugin.attach()
        self.nccl.plugin.switch_timing(on=True)
        self.context = self.nccl.communicator()
        self.ring.add_group_row("0")

    def device_ns(self, since_now_ns: int = 0) -> int:
        """Return the current time of the device's clock."""
        return self.recorder.now_ns() + NCCL_S_CLOCK_NS + since_now_ns

    def collective(self, number: int, channels: int = 2, *, flags: int = int(Flag.ASYNC)) -> int:
        """Issue a collective in torch and NCCL, and return NCCL's running task."""
        issued = self.issue(number, flags=flags)
        task = self.nccl.collective(self.context, 0, channels)
        self.recorder.returned(issued, int(EndDetection.UNKNOWN))
        return int(task)

    def kernel(self, task: int, duration_ns: int = 1000) -> None:
        """Run a kernel of the given duration that ends now."""
        now_ns = self.device_ns()
        self.nccl.kernel(self.context, task, now_ns - duration_ns, now_ns)

    def close(self) -> None:
        self.nccl.plugin.switch_timing(on=False)
        self.nccl.plugin.detach()
        super().close()
