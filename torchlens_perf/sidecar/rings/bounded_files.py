"""Numbered files of one node, such as HOST-000001.parquet: whole, their total below a cap, the newest kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchlens_perf.run import ownership

_SUFFIX = ".parquet"


class BoundedFiles:
    """Writes files with the same number into several folders. One thread."""

    def __init__(self, folders: Sequence[Path], host: str) -> None:
        """folders: all that count against the cap; they need not be there yet."""
        self._folders = folders
        self._host = host
        # Nobody else writes or removes them: asking for their sizes each time would be most of what its disk is asked.
        self._sizes: dict[Path, int] = {}
        for path in (path for folder in folders for path in files_of(folder, host)):
            with contextlib.suppress(FileNotFoundError):
                self._sizes[path] = path.stat().st_size
        self._number = max(map(number, self._sizes), default=0)
        self.removed_numbers = 0
        """How many numbers' files were removed to stay below the cap."""
        self.removed_files = 0

    def write(self, contents: Mapping[Path, Callable[[Path], None]], cap_bytes: int) -> None:
        """Writes one file into each of these folders, by what writes it to a path. Raises what that raises, or OSError.

        All or none: each is written under another name first, so that a killed process leaves no torn file.
        """
        self._number += 1
        partials: dict[Path, Path] = {}
        try:
            for folder, write in contents.items():
                folder.mkdir(exist_ok=True)
                path = folder / f"{self._host}-{self._number:06d}{_SUFFIX}"
                partials[path] = path.with_suffix(".partial")
                os.close(ownership.create(partials[path]))
                write(partials[path])
            sizes = {path: partial.stat().st_size for path, partial in partials.items()}
            self._make_room(sum(sizes.values()), cap_bytes)
            for path, partial in partials.items():
                os.replace(partial, path)
                self._sizes[path] = sizes[path]
        except BaseException:
            for partial in partials.values():
                partial.unlink(missing_ok=True)
            raise

    def _make_room(self, needed_bytes: int, cap_bytes: int) -> None:
        """Removes the oldest files, those of one number at a time, until the new ones fit below the cap."""
        numbered: dict[int, list[Path]] = {}
        for path in self._sizes:
            numbered.setdefault(number(path), []).append(path)
        total = sum(self._sizes.values()) + needed_bytes
        for each in sorted(numbered):
            if total <= cap_bytes:
                break
            for path in numbered[each]:
                path.unlink(missing_ok=True)
                total -= self._sizes.pop(path)
            self.removed_numbers += 1
            self.removed_files += len(numbered[each])


def files_of(folder: Path, host: str) -> list[Path]:
    """A node's files in a folder, the oldest first."""
    names = {path: path.stem.rpartition("-") for path in folder.glob(f"*{_SUFFIX}")}
    return sorted(path for path, (name, _, number) in names.items() if name == host and number.isdecimal())


def number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
