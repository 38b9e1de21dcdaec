"""Native taps that build at once: a tiny extension, and fake compilers that copy it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchlens_perf.hooks import python_tap
from torchlens_perf.recorder import native_tap
from torchlens_perf.run import tap_requirements
from torchlens_perf.run.processes import process_start_ticks

_ROOT = Path(__file__).parents[2]
_TINY = """
#include <Python.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

__attribute__((constructor)) static void loaded(void)
{
    const char *trace = getenv("TINY_TAP_TRACE");
    if (trace)
        close(open(trace, O_CREAT | O_WRONLY, 0600));
}

static PyModuleDef tiny = {PyModuleDef_HEAD_INIT, "_torchlens_perf_tap", NULL, -1, NULL};

PyMODINIT_FUNC PyInit__torchlens_perf_tap(void)
{
    return PyModule_Create(&tiny);
}
"""
_TORCH = """
from torch import version
__version__ = "2.99.0+tiny"
def compiled_with_cxx11_abi():
    return True
"""


def tiny_tap(folder: Path) -> Path:
    """Compile a tiny extension with the tap's name.

    When loaded, the extension writes the file TINY_TAP_TRACE.
    """
    source, built = folder / "tiny.c", folder / "tiny.so"
    source.write_text(_TINY)
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(["cc", "-shared", "-fPIC", include, str(source), "-o", str(built)], check=True)
    return built


def tiny_torch(folder: Path) -> Path:
    """Create a stub of torch that imports at once and is sufficient to build a tap.

    Return the PYTHONPATH entry.
    """
    package = folder / "torch"
    (package / "include" / "torch").mkdir(parents=True)
    (package / "include" / "torch" / "library.h").touch()
    (package / "__init__.py").write_text(_TORCH)
    (package / "version.py").write_text("git_version = '0123456789abcdef0123'\n")
    return folder


def compiler(path: Path, script: str) -> Path:
    """Create a compiler from a shell script, in which "$out" is the output file."""
    path.write_text(
        f'#!/bin/sh\nall="$*"\nwhile [ "$1" != -o ]; do shift; done; out="$2"\n{script}\n'
    )
    path.chmod(0o755)
    return path


def copying(path: Path, tap: Path, before: str = "") -> Path:
    """Create a compiler that copies the tap after running `before`.

    Each run of the compiler adds a line to PATH.runs.
    """
    return compiler(path, f'echo "$all" >> {path}.runs\n{before}\nrm -f "$out"; cat {tap} > "$out"')


def runs(path: Path) -> list[str]:
    """Return the arguments of each run of a copying compiler."""
    counted = Path(f"{path}.runs")
    return counted.read_text().splitlines() if counted.exists() else []


def empty_places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty package folder and an empty home, in which no tap exists.

    Return the tap folder in the home's cache.
    """
    monkeypatch.setattr(tap_requirements, "SOURCES", copy_of_sources(folder / "package" / "native"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("HOME", str(folder / "home"))
    cache = folder / "home" / ".cache" / "torchlens_perf"
    cache.mkdir(mode=0o700, parents=True)
    return cache


def copy_of_sources(to: Path) -> Path:
    """Copy the native sources without built files."""
    return Path(
        shutil.copytree(
            tap_requirements.SOURCES,
            to,
            ignore=shutil.ignore_patterns("*.so", "*.lock", ".build-*"),
        )
    )


def tap_name(site: Path) -> str:
    """Return the file name of the tap for the torch in `site`."""
    asked = [
        sys.executable,
        "-c",
        "from torchlens_perf.recorder import native_tap; print(native_tap.build_file_name())",
    ]
    return subprocess.run(
        asked, env=environ_with_torch(site), capture_output=True, text=True, check=True
    ).stdout.strip()


def environ_with_torch(site: Path, **changed: str) -> dict[str, str]:
    """Return an environment in which Python finds the torch in `site` and this package."""
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{_ROOT}", **changed}


@contextlib.contextmanager
def raise_build_priority(home: Path) -> Iterator[None]:
    """Raise the priority of the builds in `home` to normal if permitted.

    On a busy machine, a build with the usual low priority would take minutes.

    Builds still lower their priority at the start, which tests check from inside the compiler.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_hurry, args=(f"HOME={home}".encode(), ended))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _hurry(wanted: bytes, ended: threading.Event) -> None:
    while os.geteuid() == 0 and not ended.wait(0.05):
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(process.name) != os.getpid() and wanted in (
                    process / "environ"
                ).read_bytes().split(b"\0"):
                    os.sched_setscheduler(int(process.name), os.SCHED_OTHER, os.sched_param(0))
                    os.setpriority(os.PRIO_PROCESS, int(process.name), 0)
                    (process / "autogroup").write_text("0")


def has_ended(pid: int, within_s: float = 60) -> bool:
    """Return True if the process ends within the time limit."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if process_start_ticks(pid) is None:
            return True
        time.sleep(0.02)
    return False


# -- fixtures of the tests that import them


@pytest.fixture(scope="module")
def tap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a tiny tap outside the folders that load() searches."""
    return tiny_tap(tmp_path_factory.mktemp("tap"))


@pytest.fixture(autouse=True)
def reset_tap_cache() -> Iterator[None]:
    """Reset load()'s cache. A cached Python tap would keep later tests from loading the native tap."""
    native_tap.load_tap.cache_clear()
    yield
    native_tap.load_tap.cache_clear()
    # Resetting is safe, because no collectives are issued at this moment.
    python_tap._libraries.clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's cache folder, which is empty. The tap folder in the package is empty too."""
    return empty_places(tmp_path, monkeypatch)
