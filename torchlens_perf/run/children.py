"""Build the command line and environment of every process that this package starts.

Three rules apply to all child processes:

- `sys.executable` must be a Python interpreter. In a frozen or embedding program,
  `sys.executable` is the program itself. Starting that program as a child would start a second
  training.
- The child imports this package and its libraries from the same folders as this process.
- An environment variable marks the child. watch() and autoload() record nothing if the variable is
  set, so a child never starts further children.

The functions may be called on any thread, and import most modules only when they are called.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any

from torchlens_perf.config import CHILD
from torchlens_perf.errors import RunStoreError
from torchlens_perf.run import file_checks
from torchlens_perf.run.processes import read_kernel_bytes

SEARCH_PATH = "_TORCHLENS_PERF_SEARCH_PATH"
"""Folders for the child's sys.path, one per line. See __main__.py."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOT = os.path.dirname(_PACKAGE)
_SIDECAR_LIBRARIES = ("numpy", "pyarrow", "msgspec", "rich")
_INTERPRETER_NAME = re.compile(r"python(?:\d(?:\.(\d+))?)?[tdmu]{0,2}(?:-dbg)?")
_NOT_INHERITED = (
    # These variables give a process a rank or load a profiler into it.
    "TORCHLENS_PERF",
    "RANK",
    "LOCAL_RANK",
    "NVTX_INJECTION64_PATH",
    "CUDA_INJECTION64_PATH",
    # These variables debug the user's program. With PYTHONWARNINGS=error, for example, a library's
    # DeprecationWarning would end the sidecar.
    "PYTHONWARNINGS",
    "PYTHONDEVMODE",
    "PYTHONINSPECT",
    "PYTHONTRACEMALLOC",
    "PYTHONVERBOSE",
)
_OPTIONS_OF_THE_PROGRAM = ("dev", "importtime", "perf", "perf_jit", "showrefcount", "tracemalloc")
# opentelemetry-instrument prepends this folder to PYTHONPATH to instrument every Python process.
# Children must not create spans for this package's own requests.
_INSTRUMENTS = os.sep + os.path.join("opentelemetry", "instrumentation", "auto_instrumentation")
# NumPy's libraries start one thread per processor on import. The threads double the import time.
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def environment_at_start() -> dict[str, str]:
    """Return the environment that this process was started with.

    os.environ may differ: in the C locale, Python adds LC_CTYPE to it, which changes the mode of
    the next Python.
    """
    entries = []
    with contextlib.suppress(OSError):
        entries = read_kernel_bytes("/proc/self/environ").split(b"\0")
    environment: dict[str, str] = {}
    for each in filter(None, entries):
        name, _, value = os.fsdecode(each).partition("=")
        environment.setdefault(name, value)
    return environment or {name: value for name, value in os.environ.items() if name != "LC_CTYPE"}


def find_interpreter() -> str:
    """Return the path of the running Python interpreter.

    Raise RunStoreError if `sys.executable` cannot be verified as a Python interpreter.
    """
    reason = _why_not_interpreter(sys.executable)
    if reason:
        raise RunStoreError(f"no other process can be started: {reason}")
    return sys.executable


def check_sidecar_can_start() -> None:
    """Raise RunStoreError, with the reason, if a sidecar could not run."""
    find_interpreter()
    if not file_checks.is_file(os.path.join(_PACKAGE, "__main__.py")):
        raise RunStoreError(
            f"no other process can be started: torchlens_perf is not in a folder, but in {_ROOT}"
        )
    missing = [name for name in _SIDECAR_LIBRARIES if not _is_importable(name, build_search_path())]
    if missing:
        raise RunStoreError(
            f"the sidecar cannot start: {', '.join(missing)} not found. "
            f"Install {'them' if len(missing) > 1 else 'it'} for {sys.executable}"
        )


def build_command(*arguments: str) -> list[str]:
    """Return the command line for `torchlens-perf ARGUMENTS`.

    Raise RunStoreError as find_interpreter() does.
    """
    return [find_interpreter(), *_interpreter_options(), _PACKAGE, *arguments]


def build_script_command(path: str, *arguments: str) -> list[str]:
    """Return the command line for a file that imports only the standard library.

    Raise as find_interpreter() does.
    """
    return [find_interpreter(), "-I", "-S", path, *arguments]


def build_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child, which marks it and gives it no rank and no GPU.

    base: environment to start from, by default os.environ.
    """
    found = {
        name: value
        for name, value in (os.environ if base is None else base).items()
        if name not in _NOT_INHERITED
    }
    if "PYTHONPATH" in found:
        found["PYTHONPATH"] = _make_pythonpath_absolute(found["PYTHONPATH"])
    found.update(dict.fromkeys(_THREADS, "1"))
    return {
        **found,
        CHILD: "1",
        "CUDA_VISIBLE_DEVICES": "",
        SEARCH_PATH: "\n".join(build_search_path()),
    }


def start_detached(
    command: list[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
) -> None:
    """Start a process that is no child of this one, in a new session and in the folder /.

    env: by default build_environment(). Streams are descriptors; None for /dev/null. pass_fds:
    descriptors above 2 that the process keeps. Raise OSError if no process can be started.

    Ray's workers kill their children when they end. DeepSpeed's launcher kills the children of a
    failed rank. A program's SIGCHLD handler is called for each child, and its os.wait() returns
    each. A child that ends before its parent remains as a zombie.
    """
    env = build_environment() if env is None else env
    null = os.open(os.devnull, os.O_RDWR)
    try:
        streams = tuple(null if each is None else each for each in (stdin, stdout, stderr))
        native: Any = importlib.import_module("torchlens_perf._native")
        variables = (f"{name}={value}" for name, value in env.items())
        texts = [list(map(os.fsencode, each)) for each in (command, variables)]
        native.start_process(*texts, streams, sorted(pass_fds))
    finally:
        os.close(null)


def build_search_path() -> list[str]:
    """Return this process's module search path without the folder of the user's script.

    A file rich.py in the script's folder must not replace the library of that name. The script's
    folder is kept only if a required library is found nowhere else.
    """
    entries = [
        entry
        for entry in sys.path
        if isinstance(entry, str) and os.path.isabs(entry) and "\n" not in entry
    ]
    entries = [
        entry for entry in dict.fromkeys(entries) if not entry.rstrip(os.sep).endswith(_INSTRUMENTS)
    ]
    rest = [entry for entry in entries if entry != _script_folder()]
    if not all(_is_importable(name, rest) for name in _SIDECAR_LIBRARIES):
        rest = entries
    return rest if _ROOT in rest else [*rest, _ROOT]


def _make_pythonpath_absolute(text: str) -> str:
    """Replace the relative entries of a PYTHONPATH by absolute ones from `sys.path`.

    Python resolved these entries at startup. The working directory may have changed since then.
    """
    entries = []
    for entry in text.split(os.pathsep):
        end = os.sep + os.path.normpath(entry)
        known = [
            each
            for each in sys.path
            if isinstance(each, str) and os.path.isabs(each) and each.endswith(end)
        ]
        if os.path.isabs(entry) or not entry:
            entries.append(entry)
        else:
            entries += known[:1]
    entries = [
        entry for entry in entries if entry and not entry.rstrip(os.sep).endswith(_INSTRUMENTS)
    ]
    return os.pathsep.join(entries)


def _why_not_interpreter(path: object) -> str:
    if getattr(sys, "frozen", False):
        return f"this program is frozen (sys.frozen is set), and {path} is the program itself"
    if not path or not isinstance(path, str):
        return "Python does not know its own program (sys.executable is empty)"
    if not (file_checks.is_file(path) and os.access(path, os.X_OK)):
        return f"{path} (sys.executable) cannot be run"
    if not _is_interpreter(path):
        return f"{path} (sys.executable) is not the interpreter of the Python in {sys.base_prefix}"
    return ""


def _is_interpreter(path: str) -> bool:
    """Return True if a file, or its link target, is a Python interpreter of this installation.

    The check compares the names of the file and of its folder.
    """
    installed = False
    for each in (path, file_checks.resolve_links(path)):
        named = _INTERPRETER_NAME.fullmatch(os.path.basename(each))
        if named is not None:
            if named[1] and int(named[1]) != sys.version_info.minor:
                return False
            installed = (
                installed
                or file_checks.resolve_links(os.path.dirname(each)) in _interpreter_folders()
            )
    return installed


def _interpreter_folders() -> set[str]:
    import sysconfig

    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    folders = [os.path.join(prefix, "bin") for prefix in prefixes]
    # With PYTHONHOME, the prefixes differ from the folder of the interpreter.
    folders.append(str(sysconfig.get_config_var("BINDIR") or ""))
    return {file_checks.resolve_links(folder) for folder in folders if folder}


def _interpreter_options() -> list[str]:
    """Return this interpreter's command-line options that affect imports and text encoding.

    The options -W and -O do not affect them and are left out.
    """
    flags = sys.flags
    options = (
        ["-I"]
        if flags.isolated
        else ["-E"] * flags.ignore_environment + ["-s"] * flags.no_user_site
    )
    if not flags.isolated and getattr(flags, "safe_path", False):
        options.append("-P")
    options += ["-S"] * flags.no_site + ["-B"] * bool(flags.dont_write_bytecode)
    for name, value in getattr(sys, "_xoptions", {}).items():
        if name not in _OPTIONS_OF_THE_PROGRAM:
            options += ["-X", name if value is True else f"{name}={value}"]
    return options


def _is_importable(name: str, folders: Iterable[str]) -> bool:
    """Return True if a child that searches these folders can import a library.

    Import finders of other packages, such as those of editable installations, are also asked.
    """
    if PathFinder.find_spec(name, list(folders)) is not None:
        return True
    others = [finder for finder in sys.meta_path if finder is not PathFinder]
    return any(
        hasattr(finder, "find_spec") and finder.find_spec(name, None) is not None
        for finder in others
    )


def _script_folder() -> str:
    """Return the folder that Python prepended to sys.path for the script; "" if it did not."""
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False) or not sys.path:
        return ""
    first, main = sys.path[0], sys.modules.get("__main__")
    # With `python -m`, the first entry is the working directory.
    if getattr(main, "__spec__", None) is not None:
        return first if isinstance(first, str) else ""
    return first if first == os.path.dirname(getattr(main, "__file__", None) or "") else ""
