"""Building the native tap on collectives: by `torchlens-perf build-tap`, or by the sidecar's child.

In the background it is built once for each torch, Python and source of a user: whoever holds the folder's lock builds,
nobody waits for it. A build that the compiler has failed is remembered beside the place of the tap, and not tried again
in the background with the same compiler.
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
from torchlens_perf.run.tap_requirements import BuildError, Failure, compiler_command, place_to_build

_TIMEOUT_S = 600
_MAX_CHARACTERS = 300  # of what the compiler said
_UNFINISHED = ".build-"
_PASSING = ("Killed signal", "No space left", "memory exhausted", "Cannot allocate memory")  # not the source's fault


class _CompilerError(BuildError):
    """The compiler was there and failed: with the same input it will fail again."""


def build() -> Path:
    """The tap's file, for the torch at hand; compiles it, in 10 to 30 s, where there is none that can be loaded.

    Beside the package where that is ours to write, as in an image; else in the user's cache. Raises BuildError with
    what is missing. Not in a training process.
    """
    found = native_tap.loaded_from()
    if found is not None:
        return found
    compiler, place = _what_builds(tap_requirements.places())
    with _lock(place):
        return _built(compiler, place, timeout_s=_TIMEOUT_S)


def build_in_background(name: str) -> Path:
    """The same in a child of the sidecar: in the user's cache first, so that all of a user's environments share it.

    name: the file that the ranks have looked for. What stops the build is looked at before torch is imported, which
    takes seconds. No timeout: at the lowest priority, waiting for a processor is no fault. Raises BuildError.
    """
    compiler, place = _what_builds(tap_requirements.places()[::-1])
    failure = Failure(place, name)
    with _lock(place):
        said = failure.remembered(compiler)
        if said is not None:
            raise BuildError(said)
        if native_tap.file_name() != name:
            raise BuildError(
                "the ranks have another torch than their sidecar: run torchlens-perf build-tap with theirs"
            )
        found = native_tap.loaded_from()
        if found is not None:
            return found  # another process has built it since
        try:
            built = _built(compiler, place, timeout_s=None)
        except _CompilerError as error:
            failure.remember(compiler, str(error))
            raise
        failure.forget()
        return built


def _what_builds(places: Sequence[Path]) -> tuple[list[str], Path]:
    """The compiler's command, and the folder, made where it was not there. Raises BuildError."""
    if not recorder.NATIVE:  # there, perhaps, but it cannot be loaded
        raise BuildError(tap_requirements.NO_RECORDER)
    return compiler_command(), place_to_build(places, make=True)


@contextlib.contextmanager
def _lock(place: Path) -> Iterator[None]:
    """Held by one process of those that share the folder. Raises BuildError if that is another one."""
    try:
        descriptor = os.open(place / "tap.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BuildError(f"no lock in {place}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        taken = isinstance(error, BlockingIOError)
        raise BuildError(
            "another process builds it just now" if taken else f"{place} cannot be locked: {error.strerror}"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


# -- building


def _built(compiler: list[str], place: Path, *, timeout_s: float | None) -> Path:
    """Compiles the tap, and puts it whole into its place. The caller holds the lock."""
    import torch

    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    if not (include / "torch" / "library.h").is_file():
        raise BuildError(f"this torch came without its headers ({include})")
    abi = int(getattr(torch, "compiled_with_cxx11_abi", lambda: True)())
    tap = place / native_tap.file_name()
    try:
        with _unfinished(place) as folder:
            result = folder / tap.name
            command = [
                *compiler, *native_tap.COMPILER_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
                f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
                f"-I{sysconfig.get_path('include')}", f"-I{tap_requirements.SOURCES}",
                str(tap_requirements.SOURCES / tap_requirements.SOURCE), "-o", str(result),
                f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}",
            ]  # fmt: skip
            _run(command, folder, timeout_s)
            native_tap.load_file(result)
            _publish(result, tap)
    except ImportError as error:
        raise _CompilerError(f"what was built cannot be loaded: {error}") from None
    except OSError as error:
        raise BuildError(f"{place} cannot be written: {error.strerror or error}") from None
    native_tap.load.cache_clear()
    return tap


@contextlib.contextmanager
def _unfinished(place: Path) -> Iterator[Path]:
    """A folder for what is not finished, which nobody else can enter. Removes what killed builds have left, too."""
    for left in place.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], folder: Path, timeout_s: float | None) -> None:
    """Runs the compiler; its temporary files go to the folder. Raises BuildError."""
    environ = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}  # "error" is looked for in what it says
    said = folder / "said"
    with open(said, "wb") as output:
        try:
            # A group of its own, so that the children, which do the compiler's work, end with it. No session of its
            # own: where the kernel schedules by session, that would have the usual weight again.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, cwd=folder,
                umask=0o077, preexec_fn=os.setpgrp,
            )  # fmt: skip
        except OSError as error:
            raise _CompilerError(f"{command[0]} cannot be run: {error.strerror}") from None
    try:
        status = process.wait(timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BuildError(f"the compiler did not end within {timeout_s:.0f} s") from None
        raise
    if status:
        text = said.read_text(errors="replace")
        passing = status < 0 or any(words in text for words in _PASSING)
        raise (BuildError if passing else _CompilerError)(f"the compiler failed: {_first_error(text, status)}")


def _first_error(said: str, status: int) -> str:
    first = next((line for line in said.splitlines() if "error" in line), said[-_MAX_CHARACTERS:])
    shown = first[:_MAX_CHARACTERS]
    return "".join(each if each.isprintable() else " " for each in shown).strip() or f"status {status}"


def _publish(built: Path, tap: Path) -> None:
    """Whole or not at all, also if the machine loses its power: a tap with a hole would end processes by SIGBUS."""
    built.chmod(0o755)
    with open(built, "rb") as file:
        os.fsync(file.fileno())
    built.replace(tap)
