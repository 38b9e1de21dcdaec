"""Tests of statistics of windows, which are stored as several records."""

from __future__ import annotations

import numpy as np

from tests.support.recording import encode_window
from torchlens_perf.run.ring import record_dtype
from torchlens_perf.run.sketch import Sketch, WindowSketch, decode_windows


def test_window_is_restored_from_its_records() -> None:
    """A window with a missing record is lost and counted."""
    random = np.random.default_rng(5)
    windows = []
    for count in (1, 7, 500):
        sketch = Sketch()
        sketch.add(np.exp(random.uniform(1, 30, count)).astype(np.int64))
        windows.append(WindowSketch(sketch, lost=count, median_ns=1 << 40, mad_ns=3))
    rows = [
        (index, place, words)
        for index, window in enumerate(windows)
        for place, words in enumerate(encode_window(window))
    ]
    records = np.zeros(len(rows), record_dtype())
    for record, (index, place, words) in zip(records, rows, strict=True):
        record["name_id"], record["flags"] = index, place
        for column, word in zip(
            ("start_ns", "duration_ns", "nested_ns", "phase_ns"), words, strict=False
        ):
            record[column] = word
        record["value0"], record["value1"] = (word & (1 << 64) - 1 for word in words[4:])
    found, stray = decode_windows(records)
    assert stray == 0
    assert [name_id for name_id, _ in found] == [0, 1, 2]
    for (_, back), window in zip(found, windows, strict=True):
        assert back.sketch.to_numbers() == window.sketch.to_numbers()
        assert back[1:] == window[1:]
    second = next(at for at, row in enumerate(rows) if row[0] == 1)
    found, stray = decode_windows(np.delete(records, second))
    assert [name_id for name_id, _ in found] == [0, 2]
    assert stray == sum(row[0] == 1 for row in rows) - 1
