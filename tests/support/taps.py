"""Native taps that build at once: a tiny extension with the name of the tap."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchlens_perf.hooks.collectives import python_tap
from torchlens_perf.recorder import native_tap

_ROOT = Path(__file__).parents[2]
TINY_SOURCE = """
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


def tiny_tap(folder: Path) -> Path:
    """Compile a tiny extension with the tap's name.

    When loaded, the extension writes the file TINY_TAP_TRACE.
    """
    source, built = folder / "tiny.c", folder / "tiny.so"
    source.write_text(TINY_SOURCE)
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(["cc", "-shared", "-fPIC", include, str(source), "-o", str(built)], check=True)
    return built


def empty_places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty package folder and an empty home, in which no tap exists.

    Return the tap folder in the home's cache.
    """
    monkeypatch.setattr(native_tap, "SOURCES", copy_of_sources(folder / "package" / "native"))
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
            native_tap.SOURCES,
            to,
            ignore=shutil.ignore_patterns("*.so", ".build-*"),
        )
    )


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
