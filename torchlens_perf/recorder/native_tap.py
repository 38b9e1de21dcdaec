"""Find and load the native tap on collectives, if it was built for the installed torch.

The tap is C++ code that needs torch's headers, so it cannot be part of a wheel
(commands/tap_build.py builds it). The tap's file name contains the versions of torch, Python and
the source. Without a matching file, collectives are tapped from Python. A tap is loaded only from
folders that only this user and root can write (run/ownership.py).

A tap that can be loaded is never removed or replaced: on a shared disk, a process of another node
may have mapped the file and would die with SIGBUS.

Once attached, the tap stays until the process ends. After a watch it only forwards calls
(native/tap.cpp).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torchlens_perf.interruption import ours, suppress
from torchlens_perf.run import ownership

SOURCES = Path(__file__).parents[1] / "native"
SOURCE = "tap.cpp"
MODULE = "_torchlens_perf_tap"
# The tap's name in torch_dispatcher.find_kernel_owner(), as in native/tap.cpp.
OWNER = "torchlens_perf's native tap"
_DIGEST_DIGITS = 12


def build_file_name() -> str:
    """Return the tap's file name for this torch, Python and source.

    Raise OSError if the source is missing.
    """
    import torch

    # Builds of one version can differ in their commit, for example nightly and patched builds.
    commit = str(getattr(torch.version, "git_version", None) or "unknown")[:_DIGEST_DIGITS]
    soabi = sysconfig.get_config_var("SOABI")
    return f"{MODULE}-{torch.__version__}-{commit}-{soabi}-{_compute_source_digest()}.so"


def _compute_source_digest() -> str:
    """Return a digest of the source and all headers."""
    digest = hashlib.sha256()
    for path in (SOURCES / SOURCE, *sorted(SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:_DIGEST_DIGITS]


def tap_folders() -> list[Path]:
    """Return the folders in which a tap may be: the package's native folder and the user's cache.

    As XDG requires, relative paths of the cache are ignored. The home folder is not looked up in
    the password database, because the training process must not make network requests.
    """
    for folder in (
        os.environ.get("XDG_CACHE_HOME", ""),
        os.path.join(os.environ.get("HOME", ""), ".cache"),
    ):
        if os.path.isabs(folder):
            return [SOURCES, Path(folder) / "torchlens_perf"]
    return [SOURCES]


def find_tap_files(name: str) -> Iterator[tuple[Path, str | None]]:
    """Yield existing files called `name`, best first, each with the reason not to load it or
    None."""
    for place in tap_folders():
        path = place / name
        try:
            refused = ownership.why_others_can_change(place) or ownership.why_others_can_change(
                path
            )
            if path.is_file():
                yield path, refused
        except ours(OSError):
            continue


@functools.cache
def load_tap() -> Any | None:
    """Return the tap, or None if it is missing or cannot be loaded."""
    with suppress(OSError):  # The package may have been installed without its source.
        for path, refused in find_tap_files(build_file_name()):
            if refused is None:
                with suppress(ImportError):
                    return load_tap_file(path)
    return None


def find_loaded_tap_file() -> Path | None:
    """Return the file of the tap that load_tap() returns, or None."""
    tap = load_tap()
    return None if tap is None else Path(tap.__file__)


def list_tap_problems() -> list[str]:
    """Return a sentence for each existing tap that is not used."""
    found = []
    for path, refused in find_tap_files(build_file_name()):
        try:
            if refused is None:
                load_tap_file(path)
        except ours(ImportError) as error:
            refused = f"it cannot be loaded: {error}"
        if refused is not None:
            found.append(f"{path} is not used: {refused}")
    return found or _list_other_taps()


def _list_other_taps() -> list[str]:
    """Return a sentence on the taps that were built for something else, if there are any."""
    import torch

    found = [path.name for folder in tap_folders() for path in folder.glob(f"{MODULE}-*.so")]
    names = set(found) - {build_file_name()}
    versions = sorted({name.split("-")[1] for name in names} - {torch.__version__})
    if versions:
        return [
            f"the native tap was built for torch {', '.join(versions)}, not {torch.__version__}"
        ]
    different = "another Python, build of torch or version of torchlens_perf"
    return [f"the native tap was built for {different}"] if names else []


def describe_missing_tap() -> str:
    """Return what builds the native tap, and why existing taps are not used."""
    problems = "; ".join(list_tap_problems())
    remedy = "torchlens-perf build-tap builds the native tap"
    return f"{remedy} ({problems})" if problems else remedy


def load_tap_file(path: Path) -> ModuleType:
    """Load a tap. Raises ImportError if the file is damaged or was built for another torch."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
