"""Offsets of the recorder's structures from a C compiler, and the least cost of a mark."""

from __future__ import annotations

import ctypes
import functools
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT


@functools.cache
def _compile() -> Any:
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "native_facts.so")
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O3", f"-I{ROOT / 'torchlens_perf/native'}", "-o", library, source],
            check=True,
        )  # fmt: skip
        loaded = ctypes.CDLL(str(library))
    loaded.layout.restype = ctypes.c_char_p
    loaded.floor_ns.restype, loaded.floor_ns.argtypes = ctypes.c_longlong, [ctypes.c_long]
    return loaded


def read_layout() -> dict[str, int]:
    """Return the offset of each field of the ring file, by the names of structure and field."""
    found: dict[str, int] = json.loads(_compile().layout())
    return found


def measure_floor_ns(rounds: int) -> float:
    """Return the mean time of two clock readings and a store, in ns."""
    return float(_compile().floor_ns(rounds)) / rounds
