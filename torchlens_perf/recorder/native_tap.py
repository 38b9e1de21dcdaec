"""The native tap on collectives: found and loaded, if it has been built for the torch at hand (commands/tap_build.py).

It is C++ against torch's own headers, so it cannot be built before torch is there, as our wheel is. The file's name
holds what it was built for: torch, Python, and the source; for anything else it is not found, and collectives are
tapped from Python. It is loaded only from where nobody but this user and root can write (run/ownership.py).

Nothing of ours removes or replaces a tap that can be loaded: on a shared disk, a process of another node may have it
in memory, page by page, and would end with SIGBUS.

Attached once, it stays until the process ends, and after a watch it passes on what it gets: native/tap.cpp says why.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torchlens_perf.recorder import recorder
from torchlens_perf.run import ownership, tap_requirements

COMPILER_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
_MODULE = "_torchlens_perf_tap"
OWNER = "torchlens_perf's native tap"  # for torch_dispatcher.owner_of_tap(), see native/tap.cpp
_DIGITS = 12  # of digests in the file's name


def file_name() -> str:
    """The name of the tap for this torch, this Python and this source. Raises OSError if the source is not there."""
    import torch

    # Two builds of one version differ in their commit: nightly ones, and those that somebody has patched.
    commit = str(getattr(torch.version, "git_version", None) or "unknown")[:_DIGITS]
    soabi = sysconfig.get_config_var("SOABI")
    return f"{_MODULE}-{torch.__version__}-{commit}-{soabi}-{_source_digest()}.so"


def _source_digest() -> str:
    """All headers count, so that a new one cannot be forgotten here."""
    digest = hashlib.sha256(" ".join(COMPILER_FLAGS).encode())
    for path in (tap_requirements.SOURCES / tap_requirements.SOURCE, *sorted(tap_requirements.SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def find(name: str) -> Iterator[tuple[Path, str | None]]:
    """The files of that name, the best place first, each with why it is not to be loaded; None: it may be."""
    for place in tap_requirements.places():
        path = place / name
        try:
            refused = ownership.others_can_change(place) or ownership.others_can_change(path)
            if path.is_file():
                yield path, refused
        except OSError:
            continue  # nothing lies there, or it cannot be looked at


@functools.cache
def load() -> Any | None:
    """The tap; None where it, or the native recorder that it writes with, is not there or cannot be loaded."""
    for path in _trusted() if recorder.NATIVE else ():
        try:
            return load_file(path)
        except ImportError:
            continue
    return None


def loaded_from() -> Path | None:
    """The file of the tap that load() gives."""
    tap = load()
    return None if tap is None else Path(tap.__file__)


def problems() -> list[str]:
    """Why the files that are there for what is running are not used, one sentence each."""
    found = []
    for path, refused in find(file_name()):
        try:
            if refused is None and recorder.NATIVE:
                load_file(path)
        except ImportError as error:
            refused = f"it cannot be loaded: {error}"
        if refused is not None:
            found.append(f"{path} is not used: {refused}")
    return found


def _trusted() -> Iterator[Path]:
    try:
        yield from (path for path, refused in find(file_name()) if refused is None)
    except OSError:
        return  # the package came without its source


def load_file(path: Path) -> ModuleType:
    """Loads a tap. Raises ImportError for a damaged file, or one for another torch."""
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None  # never, with a loader
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
