"""The build of the native tap on collectives, by `torchlens-perf build-tap` or by a child process
of the sidecar.

In the background, each user builds the tap once for each combination of torch, Python and source.
The process that gets the folder's lock builds, and no other process waits for it. If the compiler
fails, a file next to the tap records that, and the background build is not repeated with the same
compiler.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchlens_perf.recorder import native_tap, recorder
from torchlens_perf.run import tap_requirements
from torchlens_perf.run.tap_requirements import (
    BuildError,
    FailureRecord,
    choose_build_folder,
    find_compiler,
)

_TIMEOUT_S = 600
_MAX_CHARACTERS = 300  # Limit of the compiler's output in an error message.
_UNFINISHED = ".build-"
_PASSING = (
    "Killed signal",
    "No space left",
    "memory exhausted",
    "Cannot allocate memory",
)  # transient errors


class _CompilerError(BuildError):
    """Raised if the compiler ran and failed. Another try would fail too."""


def build_tap() -> Path:
    """Return the tap's file for the installed torch. If no built tap can be loaded, compile one,
    which takes 10 to 30 s.

    The file is written next to the package if that is writable, as in an image, and otherwise to
    the user's cache. Must not be called in a training process. Raises BuildError with the missing
    requirement.
    """
    found = native_tap.find_loaded_tap_file()
    if found is not None:
        return found
    compiler, place = _compiler_and_folder(tap_requirements.tap_folders())
    with _lock_folder(place):
        return _compile(compiler, place, timeout_s=_TIMEOUT_S)


def build_in_background(name: str) -> Path:
    """Build in a child process of the sidecar, preferably in the user's cache, which all
    environments share.

    name: the file that the ranks looked for. Obstacles are checked before torch is imported, which
    takes seconds. There is no timeout, because at the lowest priority the build may wait long for a
    CPU. Raises BuildError.
    """
    compiler, place = _compiler_and_folder(tap_requirements.tap_folders()[::-1])
    failure = FailureRecord(place, name)
    with _lock_folder(place):
        said = failure.read_error(compiler)
        if said is not None:
            raise BuildError(said)
        if native_tap.build_file_name() != name:
            raise BuildError(
                "the ranks and their sidecar use different versions of torch: run torchlens-perf"
                " build-tap in the environment of the ranks"
            )
        found = native_tap.find_loaded_tap_file()
        if found is not None:
            return found  # Another process has built it in the meantime.
        try:
            built = _compile(compiler, place, timeout_s=None)
        except _CompilerError as error:
            failure.save_error(compiler, str(error))
            raise
        failure.delete()
        return built


def _compiler_and_folder(places: Sequence[Path]) -> tuple[list[str], Path]:
    """Return the compiler's command and the folder, created if needed. Raises BuildError."""
    if not recorder.NATIVE:  # The tap needs the native recorder.
        raise BuildError(tap_requirements.NO_RECORDER)
    return find_compiler(), choose_build_folder(places, make=True)


@contextlib.contextmanager
def _lock_folder(place: Path) -> Iterator[None]:
    """Lock the folder. Raises BuildError if another process holds the lock."""
    try:
        descriptor = os.open(
            place / "tap.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
    except OSError as error:
        raise BuildError(f"no lock in {place}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        taken = isinstance(error, BlockingIOError)
        raise BuildError(
            "another process is building the tap"
            if taken
            else f"{place} cannot be locked: {error.strerror}"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


# -- building


def _compile(compiler: list[str], place: Path, *, timeout_s: float | None) -> Path:
    """Compile the tap and move it to its place atomically. The caller holds the lock."""
    import torch

    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    if not (include / "torch" / "library.h").is_file():
        raise BuildError(f"the installed torch lacks its C++ headers ({include})")
    abi = int(getattr(torch, "compiled_with_cxx11_abi", lambda: True)())
    tap = place / native_tap.build_file_name()
    try:
        with _temporary_folder(place) as folder:
            result = folder / tap.name
            command = [
                *compiler, *native_tap.COMPILER_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
                f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
                f"-I{sysconfig.get_path('include')}", f"-I{tap_requirements.SOURCES}",
                str(tap_requirements.SOURCES / tap_requirements.SOURCE), "-o", str(result),
                f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}",
            ]  # fmt: skip
            _run_compiler(command, folder, timeout_s)
            native_tap.load_tap_file(result)
            _publish_file(result, tap)
    except ImportError as error:
        raise _CompilerError(f"the built tap cannot be loaded: {error}") from None
    except OSError as error:
        raise BuildError(f"{place} cannot be written: {error.strerror or error}") from None
    native_tap.load_tap.cache_clear()
    return tap


@contextlib.contextmanager
def _temporary_folder(place: Path) -> Iterator[Path]:
    """Create a private temporary folder. Folders left by killed builds are removed."""
    for left in place.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_compiler(command: list[str], folder: Path, timeout_s: float | None) -> None:
    """Run the compiler with its temporary files in the folder. Raises BuildError."""
    # _first_error() searches for "error", so the compiler must not translate its messages.
    environ = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
    said = folder / "said"
    with open(said, "wb") as output:
        try:
            # A process group of its own lets the timeout kill the compiler's children too. It is
            # not a session of its own, because with autogroup scheduling a new session would have
            # normal priority again.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, cwd=folder,
                umask=0o077, preexec_fn=os.setpgrp,
            )  # fmt: skip
        except OSError as error:
            raise _CompilerError(f"{command[0]} cannot be run: {error.strerror}") from None
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise BuildError(f"the compiler did not end within {timeout_s:.0f} s") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status:
        text = said.read_text(errors="replace")
        passing = status < 0 or any(words in text for words in _PASSING)
        raise (BuildError if passing else _CompilerError)(
            f"the compiler failed: {_first_error(text, status)}"
        )


def _first_error(said: str, status: int) -> str:
    first = next((line for line in said.splitlines() if "error" in line), said[-_MAX_CHARACTERS:])
    shown = first[:_MAX_CHARACTERS]
    return (
        "".join(each if each.isprintable() else " " for each in shown).strip() or f"status {status}"
    )


def _publish_file(built: Path, tap: Path) -> None:
    """Sync and rename the finished file: a file with holes after a power loss causes SIGBUS."""
    built.chmod(0o755)
    with open(built, "rb") as file:
        os.fsync(file.fileno())
    built.replace(tap)
