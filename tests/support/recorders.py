"""A recorder with its own ring file and a clock that the test sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchlens_perf._native import Recorder
from torchlens_perf.run.ring import Kind, RingFile, RingReader


class FakeClock:
    """A clock that the test sets."""

    def __init__(self, now_ns: int = 1_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds


class Rig:
    """A recorder with its own ring file, and a reader of that file."""

    def __init__(self, folder: Path, *, capacity: int = 1024, clock: Any = "fake") -> None:
        self.clock = FakeClock() if clock == "fake" else clock
        self.ring = RingFile(folder / f"{len(list(folder.iterdir()))}.ring", capacity)
        self.recorder = Recorder(self.ring.buffer, self.ring.intern, self.clock)
        self.reader = RingReader(self.ring.path)

    def records(self) -> list[dict[str, Any]]:
        """Return the records since the last call, with names and kinds as text."""
        names = self.reader.names()
        batch = self.reader.read_records()
        rows = []
        for record in batch.records:
            row = {field: int(record[field]) for field in batch.records.dtype.names}
            row["name"] = names[row.pop("name_id")]
            row["kind"] = Kind(row["kind"])
            rows.append(row)
        return rows

    def span(self, kind: Kind, name: str, nanoseconds: int) -> None:
        """Write a closed span of the given length."""
        name_id = self.ring.intern(name)
        self.recorder.begin(kind, name_id)
        self.clock.advance(nanoseconds)
        self.recorder.end(kind, name_id)

    def close(self) -> None:
        """Close the recorder and unmap the file. A second call has no effect."""
        self.recorder.close()
        self.ring.close()
        self.reader.close()
