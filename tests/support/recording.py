"""Watch a model with all hooks enabled, and read the recording from the ring file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torchlens_perf import Watch, watch
from torchlens_perf.run.ring import (
    HEAD,
    INTERNAL_ERRORS,
    UNBALANCED,
    Flag,
    GroupProgress,
    IssuedOperation,
    Kind,
    RingReader,
    record_dtype,
)
from torchlens_perf.run.sketch import WindowSketch, encode_window_words

# Settings that time every module in every step, including its backward pass.
EVERYTHING: dict[str, Any] = {"modules": "all", "backward_every": 1}


class Record(NamedTuple):
    """One record of the ring file, with names as text."""

    kind: Kind
    name: str
    step: int
    depth: int
    flags: Flag
    start_ns: int
    duration_ns: int
    nested_ns: int
    phase_ns: int
    value0: int
    value1: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Recording:
    """Everything that one rank has recorded."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.records: list[Record] = []
        self.metadata: dict[str, Any] = {}
        self.known_names: set[str] = set()
        self.interned: list[str] = []
        self.groups: list[GroupProgress] = []
        self.last_operations: list[IssuedOperation] = []
        self.unbalanced = 0
        self.internal_errors = 0

    def load(self, ring: Path) -> None:
        """Read a ring file from its beginning. Raises an error if records were overwritten."""
        reader = RingReader(ring)
        names = reader.names()
        batch = reader.read_records(final=True)
        assert batch.lost == 0, (
            f"{reader.read_counter(HEAD)} records do not fit into the ring: ask for more"
        )
        fields = [field for field in Record._fields if field != "name"]
        self.records = []
        for row in batch.records:
            values: dict[str, Any] = {field: int(row[field]) for field in fields}
            values["kind"], values["flags"] = Kind(values["kind"]), Flag(values["flags"])
            self.records.append(Record(name=names[int(row["name_id"])], **values))
        self.metadata = reader.read_metadata()
        self.known_names, self.interned = set(names), list(names)
        self.groups = reader.read_group_progress()
        self.last_operations = reader.read_last_operations()
        self.unbalanced, self.internal_errors = (
            reader.read_counter(UNBALANCED),
            reader.read_counter(INTERNAL_ERRORS),
        )
        reader.close()

    def of(self, kind: Kind, name: str | None = None) -> list[Record]:
        """Return the records of a kind, optionally only those of one name, ordered by
        their ends.
        """
        return [each for each in self.records if each.kind == kind and name in (None, each.name)]

    def names(self, kind: Kind) -> list[str]:
        """Return the names of the records of a kind, ordered by their ends."""
        return [each.name for each in self.of(kind)]

    @property
    def notes(self) -> list[str]:
        """Return the recording's notes, which say why measurements are missing."""
        return self.metadata["notes"]

    @property
    def steps(self) -> list[Record]:
        return self.of(Kind.STEP)


def ring_of_this_process(run_dir: Path) -> Path:
    """Return this process's ring file in the run directory that all ranks share."""
    (ring,) = (run_dir / "rings").glob(f"*-{os.getpid()}-*.ring")
    return ring


@contextmanager
def recorded(
    folder: Path, model: Any = None, optimizer: Any = None, **settings: Any
) -> Iterator[Recording]:
    """Watch in this process without a sidecar. The recording is complete when the context ends."""
    recording = Recording()
    settings = {"sidecar": False, "report": "off", "dir": str(folder), **settings}
    with watch(model, optimizer, **settings) as recording.watch:
        # Keep no reference, because the test may check that model and optimizer are freed.
        del model, optimizer
        assert recording.watch.run_dir is not None
        ring = ring_of_this_process(recording.watch.run_dir)
        yield recording
    recording.watch = None
    recording.load(ring)


def records_of(recording: Recording) -> Any:
    """Return the records in the order of the ring."""
    import numpy as np

    made = np.zeros(len(recording.records), record_dtype())
    for row, each in zip(made, recording.records, strict=True):
        for field in set(each._fields) - {"name"}:
            row[field] = getattr(each, field)
        row["name_id"] = recording.interned.index(each.name)
    return made


def encode_window(window: WindowSketch) -> list[list[int]]:
    """Return the words of a window's SKETCH records, as a device would write them."""
    sketch, *others = window
    head = [sketch.count, sketch.sum_ns, sketch.sum_squares, sketch.min_ns, sketch.max_ns]
    return encode_window_words([*head, *others], sketch.counts)
