"""Records of simulated spans, against those of the native recorder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.recorders import Rig
from torchlens_perf.run.ring import RingFile, RingReader
from torchlens_perf.run.rings.kinds import Kind
from torchlens_perf.simulate.recorder import SimulatedRecorder

CAPACITY, STEPS = 64, 40
# Kinds that begin, durations in ns until the next event, and None for ends.
SPANS = (
    (Kind.DATA, 5), (None, 2), (Kind.FORWARD, 1), (Kind.MODULE, 7), (Kind.WAIT, 9), (None, 1), (None, 3), (None, 0),
    (Kind.CLOSURE, 2), (Kind.FORWARD, 4), (None, 1), (None, 6),
)  # fmt: skip


def test_simulated_spans_have_the_records_of_real_ones(tmp_path: Path) -> None:
    """The ring is overwritten several times. The open step is in the header."""
    rig = Rig(tmp_path, capacity=CAPACITY)
    ring = RingFile(tmp_path / "simulated", CAPACITY)
    simulated = SimulatedRecorder(ring, rig.clock.now_ns)
    name_id = rig.ring.intern("span")
    assert ring.intern("span") == name_id
    for step in range(STEPS):
        kinds = []
        for kind, duration_ns in SPANS:
            if kind is None:
                rig.recorder.end(kinds.pop(), name_id)
                simulated.end()
            else:
                kinds.append(kind)
                rig.recorder.begin(kind, name_id)
                simulated.begin(kind, name_id)
            rig.clock.advance(duration_ns)
            simulated.now_ns += duration_ns
        rig.recorder.next_step(1, step, 3)
        simulated.end_step(1, step, 3)
        if step % 3 == 0:
            simulated.flush()
    simulated.flush()
    reader = RingReader(ring.path)
    real, made = rig.reader.read_records(), reader.read_records()

    assert (len(made.records), made.lost) == (CAPACITY, real.lost)
    assert made.lost > CAPACITY
    assert np.array_equal(made.records, real.records)
    assert reader.read_open_spans() == rig.reader.read_open_spans()
    reader.close()
    ring.close()
    rig.close()
