"""What the native tap on collectives is built from, where it may lie, and what keeps it from being built.

Training processes look for it there; commands/tap_build.py builds it; the sidecar says whether that could be done.
"""

from __future__ import annotations

import contextlib
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
from torchlens_perf.run import ownership

SOURCES = Path(__file__).parents[1] / "native"
SOURCE = "tap.cpp"
NO_RECORDER = "the native recorder is missing: install a C compiler and reinstall torchlens_perf"
AGAIN = "correct that, then run torchlens-perf build-tap"


class BuildError(TorchlensPerfError):
    """The native tap could not be built; the message says what to do."""


def places() -> list[Path]:
    """Where a tap may lie: beside the package, as in an image, then in the user's cache."""
    cache = user_cache()
    return [SOURCES] if cache is None else [SOURCES, cache]


def user_cache() -> Path | None:
    """$XDG_CACHE_HOME or $HOME/.cache; None without either. A relative path is invalid (XDG) and not used.

    The password database is not asked for a home: that may be a request over the network, in the training process.
    """
    for folder in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.environ.get("HOME", ""), ".cache")):
        if os.path.isabs(folder):
            return Path(folder) / "torchlens_perf"
    return None


def obstacle(name: str) -> str | None:
    """What keeps a tap of that name from being built in the background, and what to do about it; None: nothing known.

    Cheap: imports nothing, starts nothing, makes nothing.
    """
    try:
        compiler, place = compiler_command(), place_to_build(places()[::-1], make=False)
    except BuildError as error:
        return str(error)
    said = Failure(place, name).remembered(compiler)
    return None if said is None else f"{said}; {AGAIN}"


def compiler_command() -> list[str]:
    """The compiler's command, its program as an absolute path. Raises BuildError for what else is missing, too."""
    if importlib.util.find_spec("torchlens_perf._native") is None:
        raise BuildError(NO_RECORDER)
    if not (SOURCES / SOURCE).is_file():
        raise BuildError("the package came without its native sources: reinstall torchlens_perf")
    try:
        command = shlex.split(os.environ.get("CXX", "")) or ["g++"]  # "ccache g++" is usual
    except ValueError as error:
        raise BuildError(f"CXX cannot be read: {error}") from None
    program = shutil.which(command[0])
    if program is None:
        command, program = command[:1], shutil.which("c++")
    if program is None:
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(f"Python's headers are missing in {include}: install them (python3-dev, python3-devel)")
    return [os.path.abspath(program), *command[1:]]


def place_to_build(places: Sequence[Path], *, make: bool) -> Path:
    """The first of them that nobody else can write to, and that we can. Raises BuildError with what is wrong with each.

    make: makes the folder, and the cache that it lies in; never the user's home.
    """
    problems = []
    for place in places:
        problem = _unfit(place)
        if make and problem is None:
            problem = _made(place) or _unfit(place)
        if problem is None:
            return place
        problems.append(problem)
    if user_cache() is None:
        problems.append("neither HOME nor XDG_CACHE_HOME is an absolute path")
    raise BuildError(f"no folder for the tap: {'; '.join(problems)}")


def _made(place: Path) -> str | None:
    for folder in (place.parent, place):
        try:
            folder.mkdir(mode=0o700)  # each with its mode, whatever the umask
        except FileExistsError:
            continue
        except OSError as error:
            return f"{folder} cannot be made ({error.strerror})"
    return None


def _unfit(place: Path) -> str | None:
    """Why it cannot be used, or where it is not there, why it could not be made."""
    try:
        nearest = next(folder for folder in (place, place.parent, place.parent.parent) if os.path.lexists(folder))
        refused = ownership.others_can_change(nearest)
    except StopIteration:
        return f"{place.parent.parent} is not there"
    except OSError as error:
        return f"{place} cannot be looked at ({error.strerror})"
    if refused is None and not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} cannot be written"
    return refused


_MAX_FAILURE_BYTES = 1 << 20


class Failure:
    """What is remembered of a build that the compiler has failed: in the tap's folder, by the tap's name."""

    def __init__(self, place: Path, name: str) -> None:
        self._path = place / f"{name.removesuffix('.so')}.failed"

    def remembered(self, compiler: list[str]) -> str | None:
        """What went wrong with this compiler; None if nothing has."""
        try:
            value = json.loads(ownership.read_bytes(self._path, _MAX_FAILURE_BYTES))
            return str(value["error"]) if value["compiler"] == _identity_of(compiler) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def remember(self, compiler: list[str], error: str) -> None:
        with contextlib.suppress(OSError):  # on a full disk: it will be tried again
            self._path.write_text(json.dumps({"compiler": _identity_of(compiler), "error": error}))

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)


def _identity_of(compiler: list[str]) -> list[Any]:
    """Another one once the compiler has been updated."""
    found = os.stat(compiler[0])
    return [*compiler, found.st_size, found.st_mtime_ns]
