"""Find what is needed to build the tap, native code that measures collectives.

The tap needs its sources, a folder and a compiler. Training processes search the folders for the
built tap. commands/tap_build.py builds the tap. The sidecar reports why the tap cannot be built.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchlens_perf.errors import TorchlensPerfError
from torchlens_perf.interruption import ours, suppress
from torchlens_perf.run import ownership

SOURCES = Path(__file__).parents[1] / "native"
SOURCE = "tap.cpp"
NO_RECORDER = "the native recorder is missing: install a C compiler and reinstall torchlens_perf"
AGAIN = "correct that, then run torchlens-perf build-tap"


class BuildError(TorchlensPerfError):
    """The native tap could not be built. The message contains what to do."""


def tap_folders() -> list[Path]:
    """Return the folders in which a tap may be: the package's native folder and the user's cache."""
    cache = user_cache_folder()
    return [SOURCES] if cache is None else [SOURCES, cache]


def user_cache_folder() -> Path | None:
    """Return this package's folder in $XDG_CACHE_HOME or $HOME/.cache; None if neither is set.

    Relative paths are ignored, as XDG requires. The home folder is not looked up in the password
    database, because the training process must not make network requests.
    """
    for folder in (
        os.environ.get("XDG_CACHE_HOME", ""),
        os.path.join(os.environ.get("HOME", ""), ".cache"),
    ):
        if os.path.isabs(folder):
            return Path(folder) / "torchlens_perf"
    return None


def why_not_buildable(name: str) -> str | None:
    """Return why a tap of this name cannot be built, and what to do; None if no reason is known.

    The call is cheap: it imports no module, starts no process and creates no file.
    """
    try:
        compiler, place = find_compiler(), choose_build_folder(tap_folders()[::-1], make=False)
    except BuildError as error:
        return str(error)
    failure = FailureRecord(place, name).read_error(compiler)
    return None if failure is None else f"{failure}; {AGAIN}"


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler with an absolute path.

    Raise BuildError if the compiler, the sources or Python's headers are missing.
    """
    if importlib.util.find_spec("torchlens_perf._native") is None:
        raise BuildError(NO_RECORDER)
    if not (SOURCES / SOURCE).is_file():
        raise BuildError("the package came without its native sources: reinstall torchlens_perf")
    try:
        command = shlex.split(os.environ.get("CXX", "")) or ["g++"]  # such as "ccache g++"
    except ours(ValueError) as error:
        raise BuildError(f"CXX cannot be read: {error}") from None
    program = shutil.which(command[0])
    if program is None:
        command, program = command[:1], shutil.which("c++")
    if program is None:
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(
            f"Python's headers are missing in {include}: install them (python3-dev, python3-devel)"
        )
    return [os.path.abspath(program), *command[1:]]


def choose_build_folder(places: Sequence[Path], *, make: bool) -> Path:
    """Return the first folder that this user can write to and other users cannot.

    make: whether to create the folder and its parent, which is never the user's home. Raise
    BuildError with the reasons if no folder can be used.
    """
    problems = []
    for place in places:
        problem = _why_unusable(place)
        if make and problem is None:
            problem = _make_folders(place) or _why_unusable(place)
        if problem is None:
            return place
        problems.append(problem)
    if user_cache_folder() is None:
        problems.append("neither HOME nor XDG_CACHE_HOME is an absolute path")
    raise BuildError(f"no folder for the tap: {'; '.join(problems)}")


def _make_folders(place: Path) -> str | None:
    for folder in (place.parent, place):
        try:
            # Parents are created one by one, because mkdir(parents=True) ignores the mode for them.
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        except ours(OSError) as error:
            return f"{folder} cannot be made ({error.strerror})"
    return None


def _why_unusable(place: Path) -> str | None:
    """Return why a folder can neither be used nor created; None if it can."""
    try:
        nearest = next(
            folder
            for folder in (place, place.parent, place.parent.parent)
            if os.path.lexists(folder)
        )
        refused = ownership.why_others_can_change(nearest)
    except StopIteration:
        return f"{place.parent.parent} is not there"
    except ours(OSError) as error:
        return f"{place} cannot be looked at ({error.strerror})"
    if refused is None and not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} cannot be written"
    return refused


_MAX_FAILURE_BYTES = 1 << 20


class FailureRecord:
    """Record of a failed build, in a file next to the tap with the suffix `.failed`."""

    def __init__(self, place: Path, name: str) -> None:
        self._path = place / f"{name.removesuffix('.so')}.failed"

    def read_error(self, compiler: list[str]) -> str | None:
        """Return the error of the last build if it used this compiler; None if not known."""
        try:
            value = json.loads(ownership.read_regular_file(self._path, _MAX_FAILURE_BYTES))
            return (
                str(value["error"]) if value["compiler"] == _compiler_identity(compiler) else None
            )
        except ours(OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def save_error(self, compiler: list[str], error: str) -> None:
        # If the record cannot be written, the build will be tried again.
        with suppress(OSError):
            self._path.write_text(
                json.dumps({"compiler": _compiler_identity(compiler), "error": error})
            )

    def delete(self) -> None:
        self._path.unlink(missing_ok=True)


def _compiler_identity(compiler: list[str]) -> list[Any]:
    """Return the compiler's command, size and time, which change when the compiler is updated."""
    found = os.stat(compiler[0])
    return [*compiler, found.st_size, found.st_mtime_ns]
