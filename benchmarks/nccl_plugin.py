"""Cost of the NCCL plugin for each collective: NCCL's calls of the plugin, and the recorder's work.

The tests' fake NCCL makes the calls. The cost of the fake NCCL itself is measured with a plugin
that does nothing, subtracted and shown. NVIDIA's inspector plugin was measured once without its
output on similar hardware. The inspector's figures include the cost of the fake NCCL.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.measure import Table, interleaved
from tests.support.device.fake_nccl import NcclRig, compile_nccl
from torchlens_perf import _native

CHANNELS = (1, 8, 16, 32)
BARS_NS = {"1": 200, "32": 2000, "between": 10, "off": 10}
NAMES = {"1": "1 channel", "between": "seen and not timed", "off": "given up"}
INSPECTOR_NS = {"1": 487, "8": 1762, "16": 3137, "32": 6123}
ROUNDS, CALLS = 40, 2000


def costs_ns(rig: NcclRig, rounds: int, calls: int) -> dict[str, list[float]]:
    """Return the ns of a recorded collective by round, for each variant.

    The variants are the plugin and an "idle" one that does nothing, each for several numbers of
    channels, the plugin with timing disabled ("between"), and the plugin with an event mask of 0
    ("off").
    """
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    marks = pointer_of(_native.collective_marks(), b"torchlens_perf._native.collective_marks")

    def cost(channels: int, *, on: bool, idle: bool, masked: bool = False) -> float:
        rig.nccl.plugin.switch_timing(on=on)
        if masked:
            rig.nccl.set_mask(0)
        rig.nccl.use_nothing(int(idle))
        return float(rig.nccl.cost_ns(rig.context, marks, channels, calls))

    variants: dict[str, Callable[[], float]] = {}
    for idle in (False, True):
        for number in CHANNELS:
            variants[f"{number} idle" if idle else f"{number}"] = partial(
                cost, number, on=True, idle=idle
            )
        variants["between idle" if idle else "between"] = partial(cost, 1, on=False, idle=idle)
        variants["off idle" if idle else "off"] = partial(cost, 1, on=False, idle=idle, masked=True)
    return interleaved(variants, rounds)


def main() -> int:
    """Print the table. Return the number of missed bars."""
    table = Table(
        "a collective", "plugin's ns", "NCCL's side of it, ns", "bar", "", "NVIDIA's inspector, ns"
    )
    with tempfile.TemporaryDirectory() as folder:
        library = compile_nccl(Path(folder) / "compiled.so", "-shared", "-fPIC")
        rig = NcclRig(Path(folder), library, 6)
        # Use the fastest round, because other work on the machine slows rounds down.
        found = {name: min(values) for name, values in costs_ns(rig, ROUNDS, CALLS).items()}
        rig.close()
    for name in (*map(str, CHANNELS), "between", "off"):
        idle_ns = found[f"{name} idle"]
        added_ns, bar_ns = found[name] - idle_ns, BARS_NS.get(name)
        verdict = (
            ("", "") if bar_ns is None else (f"at most {bar_ns} ns", table.bar(added_ns <= bar_ns))
        )
        what = NAMES.get(name, f"{name} channels")
        table.row(
            what,
            f"{added_ns:.0f}",
            f"{idle_ns - found['off idle']:.0f}",
            *verdict,
            INSPECTOR_NS.get(name, ""),
        )
    return table.missed
