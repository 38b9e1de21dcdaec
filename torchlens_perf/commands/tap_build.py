"""Compile the native tap on collectives for the installed torch (`torchlens-perf build-tap`).

torch.utils.cpp_extension has the compiler's flags for the installed torch. ninja is not needed.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

from torchlens_perf.errors import TorchlensPerfError
from torchlens_perf.recorder import native_tap
from torchlens_perf.recorder.recorder import find_recording_obstacle
from torchlens_perf.run import ownership

# at::RecordFunction has another layout without NDEBUG, with which torch is built. Debug symbols,
# which Python's own flags ask for, would double the time of the build.
_COMPILER_FLAGS = ("-O2", "-std=c++20", "-fvisibility=hidden", "-w", "-g0", "-DNDEBUG")


class BuildError(TorchlensPerfError):
    """The native tap could not be built. The message contains what to do."""


def build_tap() -> Path:
    """Return the tap's file for the installed torch. Without a usable tap, compile one.

    Compiling takes 10 to 30 s. The file is written next to the package if that is possible, as in
    an image, and otherwise to the user's cache. Must not be called in a training process. Raises
    BuildError.
    """
    obstacle = find_obstacle()
    if obstacle is not None:
        raise BuildError(obstacle)
    found = native_tap.find_loaded_tap_file()
    if found is not None:
        return found
    folder = _choose_folder()
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as temporary:
            return _publish_file(_compile(temporary), folder)
    except ImportError as error:
        raise BuildError(f"the built tap cannot be loaded: {error}") from None
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error.strerror or error}") from None


def find_obstacle() -> str | None:
    """Return what the build lacks here, and what to do. None if no obstacle is known."""
    missing = find_recording_obstacle()
    if missing is not None:  # The tap writes by the native recorder.
        return str(missing)
    if not (native_tap.SOURCES / native_tap.SOURCE).is_file():
        return "the package came without its native sources: reinstall torchlens_perf"
    # setuptools uses the same compiler.
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    if shutil.which(compiler.split()[0]) is None:
        return f"no C++ compiler ({compiler}): install g++, or name one in CXX"
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        return (
            f"Python's headers are missing in {include}: install them (python3-dev, python3-devel)"
        )
    return None


def _choose_folder() -> Path:
    """Return the first tap folder that this user can write to and other users cannot."""
    problems = []
    for folder in native_tap.tap_folders():
        problem = _make_folder(folder)
        if problem is None:
            return folder
        problems.append(problem)
    if len(problems) == 1:
        problems.append("neither HOME nor XDG_CACHE_HOME is an absolute path")
    raise BuildError(f"no folder for the tap: {'; '.join(problems)}")


def _make_folder(folder: Path) -> str | None:
    """Create a folder and its parent if they are missing. Return why it cannot be used, or None."""
    try:
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
        refused = ownership.why_others_can_change(folder)
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    if refused is None and not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written"
    return refused


def _compile(folder: str) -> Path:
    """Compile the tap into a folder. The compiler prints its messages to stderr."""
    try:
        from setuptools import Distribution, Extension
        from setuptools.errors import BaseError, CCompilerError
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        raise BuildError(f"torch.utils.cpp_extension cannot be imported: {error}") from None
    source = str(native_tap.SOURCES / native_tap.SOURCE)
    extension: Extension = CppExtension(
        native_tap.MODULE,
        [source],
        include_dirs=[str(native_tap.SOURCES)],
        extra_compile_args=list(_COMPILER_FLAGS),
    )
    build = BuildExtension(Distribution({"ext_modules": [extension]}), use_ninja=False)
    build.build_lib = build.build_temp = folder
    try:
        build.ensure_finalized()
        build.run()
    except (BaseError, CCompilerError) as error:
        raise BuildError(f"the compiler failed: {error}") from None
    return Path(build.get_outputs()[0])


def _publish_file(built: Path, folder: Path) -> Path:
    """Move a tap that can be loaded to its place. Raises ImportError and OSError."""
    native_tap.load_tap_file(built)
    native_tap.load_tap.cache_clear()
    # Another build may have ended before this one. A job may already have mapped its tap.
    found = native_tap.find_loaded_tap_file()
    if found is not None:
        return found
    built.chmod(0o755)
    # After a power loss, an unwritten file could have holes, which cause SIGBUS.
    with open(built, "rb") as file:
        os.fsync(file.fileno())
    native_tap.load_tap.cache_clear()
    return built.replace(folder / native_tap.build_file_name())
