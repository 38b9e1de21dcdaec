"""Tests of the plugin's view of NCCL's structures against the documented layout of interfaces 5
and 6.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import subprocess
from ctypes import POINTER, c_bool, c_char_p, c_int, c_size_t, c_uint8, c_uint64, c_void_p
from pathlib import Path

import pytest

from torchlens_perf.hooks.collectives import nccl_plugin

COMPILER = shutil.which("gcc") or shutil.which("cc")
HEADERS = Path(nccl_plugin.__file__).parents[2] / "native"
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


class CollApi(ctypes.Structure):
    """The structure from version 5 on."""

    _fields_ = [
        ("function", c_char_p), ("count", c_size_t), ("datatype", c_char_p), ("root", c_int), ("stream", c_void_p),
        ("captured", c_bool),
    ]  # fmt: skip


class P2pApi(ctypes.Structure):
    """The structure from version 5 on."""

    _fields_ = [
        ("function", c_char_p), ("count", c_size_t), ("datatype", c_char_p), ("stream", c_void_p),
        ("captured", c_bool),
    ]  # fmt: skip


class Coll(ctypes.Structure):
    """The structure of version 5."""

    _fields_ = [
        ("sequence", c_uint64), ("function", c_char_p), ("send", c_void_p), ("receive", c_void_p),
        ("count", c_size_t), ("root", c_int), ("datatype", c_char_p), ("channels", c_uint8), ("warps", c_uint8),
        ("algorithm", c_char_p), ("protocol", c_char_p), ("group", c_void_p),
    ]  # fmt: skip


class P2p(ctypes.Structure):
    """The structure of version 5."""

    _fields_ = [
        ("function", c_char_p), ("buffer", c_void_p), ("datatype", c_char_p), ("count", c_size_t), ("peer", c_int),
        ("channels", c_uint8), ("group", c_void_p),
    ]  # fmt: skip


class KernelCh(ctypes.Structure):
    """A kernel on one channel."""

    _fields_ = [("channel", c_uint8), ("device_ns", c_uint64)]


class Details(ctypes.Union):
    """A union whose valid member depends on the event's type."""

    _fields_ = [
        ("coll_api", CollApi),
        ("p2p_api", P2pApi),
        ("coll", Coll),
        ("p2p", P2p),
        ("kernel_ch", KernelCh),
    ]


class Event(ctypes.Structure):
    """The event of versions 5 and 6."""

    _fields_ = [("type", c_uint64), ("parent", c_void_p), ("rank", c_int), ("details", Details)]


# Offsets that the plugin reads, counted by hand for 64-bit systems.
EVENT = {"type": 0, "parent": 8, "rank": 16, "details": 24}
FIELDS = {
    "coll_api.captured": 40, "p2p_api.captured": 32, "coll.channels": 56, "p2p.peer": 32, "p2p.channels": 36,
    "kernel_ch.device_ns": 8,
}  # fmt: skip
PROFILER = {"name": 0, "init": 8, "start": 16, "stop": 24, "record": 32, "finalize": 40}
VALUES = {
    "NCCL_GROUP": 1, "NCCL_COLL": 2, "NCCL_P2P": 4, "NCCL_KERNEL_CH": 64, "NCCL_GROUP_API": 256,
    "NCCL_COLL_API": 512, "NCCL_P2P_API": 1024, "NCCL_KERNEL_CH_STOP": 22, "NCCL_SUCCESS": 0,
}  # fmt: skip


def offset(path: str) -> int:
    """Return the offset of a field in the union, as ctypes computes it."""
    event, field = path.split(".")
    kind = dict(Details._fields_)[event]
    return int(getattr(Details, event).offset + getattr(kind, field).offset)


def test_offsets_equal_those_of_the_documented_layout() -> None:
    """The numbers in this file equal those that follow from the documented order of fields."""
    assert {name: getattr(Event, name).offset for name in EVENT} == EVENT
    assert {path: offset(path) for path in FIELDS} == FIELDS
    assert Event.type.size == 8
    assert ctypes.sizeof(POINTER(c_int)) == 8


def test_offsets_equal_those_of_the_plugin_header(tmp_path: Path) -> None:
    """A compiler computes the offsets of the header."""
    wanted = {
        **{f"offsetof(NcclEvent, {name})": value for name, value in EVENT.items()},
        **{f"offsetof(NcclDetails, {path})": value for path, value in FIELDS.items()},
        **{f"offsetof(NcclProfiler, {name})": value for name, value in PROFILER.items()},
        **VALUES,
        "sizeof(((NcclEvent *)0)->type)": 8,
        "offsetof(NcclState, kernel_device_ns)": 0,
    }
    prints = "".join(f'    printf("%d\\n", (int)({expression}));\n' for expression in wanted)
    source = tmp_path / "print.c"
    source.write_text(
        f'#include <stdio.h>\n#include "nccl_abi.h"\nint main(void)\n{{\n{prints}    return'
        " 0;\n}\n"
    )
    command = [
        str(COMPILER),
        "-std=gnu11",
        f"-I{HEADERS}",
        "-o",
        str(tmp_path / "print"),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    printed = subprocess.run(
        [str(tmp_path / "print")], check=True, capture_output=True, text=True
    ).stdout
    assert dict(zip(wanted, map(int, printed.split()), strict=True)) == wanted


def test_plugin_exports_interfaces_5_and_6_only() -> None:
    """NCCL 2.27 and older find no known interface and continue without a plugin."""
    path = nccl_plugin.find_plugin_file()
    assert path is not None
    library = ctypes.CDLL(str(path))
    found = [version for version in range(1, 10) if hasattr(library, f"ncclProfiler_v{version}")]
    assert found == [5, 6]
    for version in found:
        name = c_char_p.in_dll(library, f"ncclProfiler_v{version}")
        assert name.value == b"torchlens_perf"


@pytest.mark.long
def test_newest_nccl_asks_for_an_interface_of_the_plugin() -> None:
    """NCCL asks a plugin for the newest interface first, by a symbol's name."""
    newest = os.environ.get("NEWEST")
    if newest is None:
        pytest.skip("NEWEST names no environment with the newest torch: `make test-long` does")
    (library,) = Path(newest).glob("lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        asked = {int(found[1]) for found in re.finditer(rb"ncclProfiler_v(\d+)\0", data)}
    assert asked >= {5, 6}
    # A later interface is not implemented, and NCCL then asks for version 6.
    assert max(asked) <= 7


@pytest.mark.long
def test_plugin_header_equals_headers_of_nccl(tmp_path: Path) -> None:
    """NCCL's wheels do not contain these headers, so a clone of NCCL is needed."""
    sources = os.environ.get("NCCL_SOURCES")
    if sources is None:
        pytest.skip("NCCL_SOURCES names no clone of https://github.com/NVIDIA/nccl")
    for tag, newest in (("v2.28.9-1", 5), ("v2.29.7-1", 6), ("v2.30.7-1", 6)):
        headers = tmp_path / tag / "profiler"
        headers.mkdir(parents=True)
        for name in (
            "../nccl_profiler.h",
            *(f"profiler_v{each}.h" for each in range(1, newest + 1)),
        ):
            path = os.path.normpath(f"src/include/plugin/profiler/{name}")
            show = ["git", "-C", sources, "show", f"{tag}:{path}"]
            (headers / name).write_bytes(
                subprocess.run(show, capture_output=True, check=True).stdout
            )
        for empty in ("common.h", "err.h", "os.h"):
            (headers.parent / empty).touch()
        check = Path(__file__).with_name("nccl_headers.cpp")
        command = [
            "g++", "-std=c++17", "-fsyntax-only", f"-DNEWEST={newest}", f"-I{headers.parent}",
            f"-I{HEADERS}", str(check),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{tag}: {done.stderr}"
