"""NVML without a GPU: a fake library under the real pynvml, with readings set by tests."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import pynvml

from tests.support.device.shim_kernels import COMPILER, HERE

UUIDS = tuple(f"GPU-00000000-0000-0000-0000-{index:012d}" for index in range(4))
MS = 1_000_000
# Readings of a busy Hopper GPU, in the keywords of fake_nvml.c.
HOPPER = {
    "temperature": 61, "sm_mhz": 1700, "sm_max_mhz": 1980, "memory_mhz": 3201, "reasons": 4, "busy": 97,
    "memory_used": 100 << 30, "memory_total": 141 << 30,
    "field 186": 498_123, "field 83": 5_000_000_000, "field 82": 74, "field 190": 700_000,
    "field 74": 0, "field 75": 0, "field 76": 0, "field 77": 0, "field 78": 0, "field 79": 0,
    "field 269": 0, "field 270": 0, "field 271": 0,
    "field 94": 0, "field 197": 5 << 32, "field 198": 6 << 32, "field 138.4294967295": 10, "field 139.4294967295": 20,
    "field 3": 1, "field 4": 0, "field 142": 0, "field 143": 2, "field 144": 0, "field 145": 0, "field 230": 0,
    **{f"field {number}.{link}": 0 for number in (161, 162, 163) for link in range(18)},
    "process 7": 90,
    "gpm 1": 98, "gpm 2": 80, "gpm 3": 40, "gpm 5": 55, "gpm 10": 30,
}  # fmt: skip
# Ampere has no GPM and lacks newer throttling counters. NVLink errors are sums over all links.
AMPERE = {
    name: value
    for name, value in HOPPER.items()
    if not name.startswith(("gpm", "field 161", "field 162", "field 163", "field 269", "field 27"))
} | {"field 52": 3, "field 59": 1, "field 38": 0, "field 45": 2}
# A workstation's GPU has no ECC, no NVLink and no memory temperature. On this GPU, another function
# reads the power.
WORKSTATION = {
    "temperature": 70, "sm_mhz": 2500, "sm_max_mhz": 3000, "memory_mhz": 10_000, "reasons": 0x20, "busy": 50,
    "memory_used": 8 << 30, "memory_total": 24 << 30, "power_mw": 310_500,
}  # fmt: skip


def compile_nvml(target: Path) -> Path:
    """Compile the fake library. Raises CalledProcessError."""
    command = [
        str(COMPILER),
        "-x",
        "c",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
    ]
    subprocess.run(
        [*command, "-o", str(target), str(HERE / "fake_nvml.c")],
        check=True,
        capture_output=True,
        text=True,
    )
    return target


class FakeNvml:
    """The file with the fake library's readings, and the library itself once this process has
    loaded it.
    """

    def __init__(self, script: Path) -> None:
        """Set the path of the file with the readings. The caller puts this path into FAKE_NVML."""
        self.script = script
        self.gpus: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._written = 0
        self._library: Any = None

    def load(self, library: Path) -> None:
        """Make pynvml use a separate copy of the fake library, because the library has state."""
        self._library = ctypes.CDLL(str(library))
        self._library.fake_calls.argtypes = [ctypes.c_char_p]
        self._library.fake_calls.restype = self._library.fake_allocated.restype = ctypes.c_long
        pynvml.nvmlLib = self._library
        pynvml._nvmlGetFunctionPointer_cache.clear()

    def unload(self) -> None:
        """Restore pynvml to its state before load()."""
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()

    def write(self, *lines: str) -> None:
        """Make the library return the values in self.gpus and the additional lines."""
        text = [f"gpus {len(self.gpus)}"]
        for index, gpu in enumerate(self.gpus):
            text += [f"gpu {index} {name} {value}" for name, value in gpu.items()]
        partial = self.script.with_suffix(".partial")
        partial.write_text("\n".join([*text, *lines, ""]))
        self._written += 1
        # A new modification time makes the library read the file again.
        os.utime(partial, ns=(self._written, self._written))
        os.replace(partial, self.script)

    def calls(self, function: str) -> int:
        """Return the number of calls of a library function."""
        return int(self._library.fake_calls(function.encode()))

    @property
    def allocated(self) -> int:
        """Return the number of GPM samples and event sets that were not freed."""
        return int(self._library.fake_allocated())
