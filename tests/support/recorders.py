"""The two recorder implementations, and a ring to write into: what the tests of the recorder run over."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from torchlens_perf.recorder import python
from torchlens_perf.run.ring import Kind, Reader, RingFile

try:
    from torchlens_perf import _native
except ImportError:
    _native = None

IMPLEMENTATIONS: list[ModuleType] = [module for module in (_native, python) if module is not None]
IDS = [module.__name__.rpartition("_")[2] for module in IMPLEMENTATIONS]


class FakeClock:
    """A clock that the test moves."""

    def __init__(self, now_ns: int = 1_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds


class Rig:
    """A recorder of one implementation on a ring file of its own, and a reader of that file."""

    def __init__(self, implementation: ModuleType, folder: Path, *, capacity: int = 1024, clock: Any = "fake") -> None:
        self.implementation = implementation
        self.clock = FakeClock() if clock == "fake" else clock
        self.ring = RingFile(folder / f"{len(list(folder.iterdir()))}.ring", capacity)
        self.recorder = implementation.Recorder(self.ring.buffer, self.ring.intern, self.clock)
        self.reader = Reader(self.ring.path)

    def records(self) -> list[dict[str, Any]]:
        """What was written since the last call, with names and kinds in words."""
        names = self.reader.names()
        batch = self.reader.read()
        rows = []
        for record in batch.records:
            row = {field: int(record[field]) for field in batch.records.dtype.names}
            row["name"] = names[row.pop("name_id")]
            row["kind"] = Kind(row["kind"])
            rows.append(row)
        return rows

    def span(self, kind: Kind, name: str, nanoseconds: int) -> None:
        """A closed span of that length."""
        name_id = self.ring.intern(name)
        self.recorder.begin(kind, name_id)
        self.clock.advance(nanoseconds)
        self.recorder.end(kind, name_id)

    def close(self) -> None:
        """Ends the recorder and unmaps the file; again is harmless."""
        self.recorder.close()
        self.ring.close()
        self.reader.close()
