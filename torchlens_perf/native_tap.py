"""The native tap on collectives: built once for the torch at hand, by `torchlens-perf build-tap`, then loaded.

It is C++ against torch's own headers, so it cannot be built before torch is there, as our wheel is. The file's name
holds what it was built for: torch, Python, and the source; for anything else it is not found, and collectives are
tapped from Python.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from torchlens_perf import recorder
from torchlens_perf.errors import TorchlensPerfError

_SOURCES = Path(__file__).parent / "native"
_MODULE = "_torchlens_perf_tap"
_BUILD_TIMEOUT_S = 600


class BuildError(TorchlensPerfError):
    """The native tap could not be built; the message says what to do."""


def places() -> list[Path]:
    """Where the tap is looked for, and built: beside the package, else in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return [_SOURCES, cache / "torchlens_perf"]


def file_name() -> str:
    """The name of the tap for this torch, this Python and this source."""
    import torch

    source = b"".join((_SOURCES / name).read_bytes() for name in ("tap.cpp", "tap_timing.h", "collective.h"))
    digest = hashlib.sha256(source).hexdigest()[:12]
    return f"{_MODULE}-{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{digest}.so"


def find() -> Path | None:
    """The tap's file; None if it has not been built for what is running."""
    name = file_name()
    return next((place / name for place in places() if (place / name).is_file()), None)


@functools.cache
def load() -> Any | None:
    """The tap; None where it, or the native recorder that it writes with, is not there or cannot be loaded."""
    path = find() if recorder.NATIVE else None
    if path is None:
        return None
    try:
        return _loaded(path)
    except ImportError:
        return None


def problem() -> str | None:
    """Why a tap that is there cannot be loaded (a damaged file, a missing symbol); None if it can, or is not there."""
    path = find() if recorder.NATIVE else None
    if path is None or load() is not None:
        return None
    try:
        _loaded(path)
    except ImportError as error:
        return str(error)
    return None


def _loaded(path: Path) -> ModuleType | None:
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    if spec is None:
        return None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def marks() -> Any:
    """What the tap is to record with."""
    return recorder.collective_marks()


def build() -> Path:
    """Compiles the tap, some ten seconds, and returns its file. Raises BuildError with what is missing."""
    if not recorder.NATIVE:
        raise BuildError("the native recorder is missing: install a C compiler and reinstall torchlens_perf")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    import torch

    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    if not (include / "torch" / "library.h").is_file():
        raise BuildError(f"this torch came without its headers ({include})")
    place = _writable_place()
    descriptor, partial = tempfile.mkstemp(suffix=".partial", dir=place)
    os.close(descriptor)
    command = [
        compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(_cxx11_abi(torch))}",
        f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}", f"-I{sysconfig.get_path('include')}",
        f"-I{_SOURCES}", str(_SOURCES / "tap.cpp"), "-o", partial,
        f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:])
            raise BuildError(f"the compiler failed: {first}")
        os.chmod(partial, 0o755)
        os.replace(partial, place / file_name())
    except subprocess.TimeoutExpired:
        raise BuildError(f"the compiler did not end within {_BUILD_TIMEOUT_S} s") from None
    finally:
        Path(partial).unlink(missing_ok=True)
    load.cache_clear()
    return place / file_name()


def _writable_place() -> Path:
    for place in places():
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(place, os.W_OK):
            return place
    raise BuildError(f"none of these can be written: {', '.join(str(place) for place in places())}")


def _cxx11_abi(torch_module: Any) -> bool:
    return bool(getattr(torch_module, "compiled_with_cxx11_abi", lambda: True)())
