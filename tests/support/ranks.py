"""A rank without a training job: a real session and ring file, with spans at times that the test
chooses.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorders import FakeClock
from tests.support.tables import MS
from torchlens_perf.config import Config
from torchlens_perf.recorder.session import Session
from torchlens_perf.run.directory import RunDirectory, create_local_folders, create_ring
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.run.ring import Kind
from torchlens_perf.sidecar.node import Sidecar

HOST = "node-a"
KINDS = {
    "data": Kind.DATA, "forward": Kind.FORWARD, "backward": Kind.BACKWARD, "optimizer": Kind.OPTIMIZER,
    "communication": Kind.WAIT,
}  # fmt: skip


def identity_of(run: RunDirectory, rank: int, world_size: int = 2, **changed: Any) -> Identity:
    """Return the identity of a live rank on HOST, whose process is the test's process."""
    values: dict[str, Any] = {
        "run_id": run.run_id, "rank": rank, "local_rank": rank, "world_size": world_size,
        "local_world_size": world_size, "attempt": 0, "host": HOST, "pid": os.getpid(),
        "process_started": process_start_ticks(os.getpid()), "launcher_pid": os.getppid(), "elastic": False,
        "program": "train.py", "traceparent": "", "attributes": {}, "node": changed.get("host", HOST),
    }  # fmt: skip
    return Identity(**{**values, **changed})


class Rank:
    """One rank of a run that the test drives by hand."""

    def __init__(self, run: RunDirectory, rank: int, world_size: int = 2, **settings: Any) -> None:
        """Create the rank.

        `registered`: this node's sidecar finds the ring. `identity` overrides fields of
        identity_of().

        `first_step` is the step in which recording begins.
        """
        changed, registered = settings.pop("identity", {}), settings.pop("registered", True)
        first_step = settings.pop("first_step", 0)
        config = Config(**{"ring_records": 4096, "report": "text", **settings})
        self.identity = identity_of(run, rank, world_size, **changed)
        ring = create_ring(run, self.identity, config.ring_capacity, first_step=first_step)
        self.ring = ring
        self.clock = FakeClock(1_000_000)
        self.session = Session(config, self.identity, ring, self.clock)
        self.session.publish()
        if registered:
            run.register_ring(self.identity.host, ring.path)

    @property
    def ring_path(self) -> Path:
        return self.ring.path

    def steps(self, count: int, **parts_ms: float) -> None:
        """Make `count` steps with the given phases in ms.

        `host` is the time in ms outside the phases.
        """
        recorder = self.session.recorder
        for _ in range(count):
            for part, milliseconds in parts_ms.items():
                if part == "host":
                    self.clock.advance(round(milliseconds * MS))
                    continue
                name_id = self.session.intern(part)
                recorder.begin(KINDS[part], name_id)
                self.clock.advance(round(milliseconds * MS))
                recorder.end(KINDS[part], name_id)
            recorder.next_step(0, 123_000_000, 1)

    def begin(self, kind: Kind, name: str) -> None:
        """Begin a span that stays open."""
        self.session.recorder.begin(kind, self.session.intern(name))

    def close(self, **report: Any) -> None:
        """End the rank as if it left its watch."""
        self.session.close(report)


@contextlib.contextmanager
def run_without_traces(folder: Path) -> Iterator[RunDirectory]:
    """Yield an empty run directory. At the end, remove the local folders of the run's rings."""
    made = make_run(folder)
    yield made
    for local in create_local_folders(made.run_id):
        for path in local.iterdir():
            path.unlink()
        local.rmdir()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """Yield an empty run directory."""
    with run_without_traces(tmp_path) as made:
        yield made


def make_run(folder: Path, name: str = "") -> RunDirectory:
    """Create an empty run directory.

    The unique name is also used for the folder of the run's rings in shared memory.
    """
    run = RunDirectory(folder / (name or f"test-{uuid.uuid4().hex[:12]}"))
    run.create()
    return run


def read_to_end(run: RunDirectory) -> None:
    """Run a sidecar that reads and stores everything that the ranks have recorded."""
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.save_records()
    sidecar.close()
