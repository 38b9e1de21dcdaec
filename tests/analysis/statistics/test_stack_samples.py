"""Samples of a rank's stack count in the part of a typical step in which they were taken."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.support.saved import save_and_load
from tests.support.tables import MS
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.analysis.statistics.stack_samples import StackSample
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.ring import Flag, Kind, record_dtype

NAMES = ["", "log", "mean"]
# Kind, name, begin and end in ms of a step of 100 ms.
STEP = [
    (Kind.DATA, 0, 0, 10), (Kind.FORWARD, 0, 20, 30), (Kind.SECTION, 2, 42, 48),
    (Kind.SECTION, 1, 40, 60), (Kind.BACKWARD, 0, 60, 80), (Kind.STEP, 0, 0, 100),
]  # fmt: skip
LAST = 6
"""The first steps are the warm-up."""


def lines_of(*samples: tuple[float, float], step: int = LAST, flags: int = 0) -> dict[str, int]:
    """Return the counted samples, from and to in ms of the step. The other steps have none."""
    rows = [(number, *each) for number in range(LAST + 3) for each in STEP]
    records = np.zeros(len(rows), record_dtype())
    for record, (number, kind, name, begin, end) in zip(records, rows, strict=True):
        record["kind"], record["name_id"], record["step"] = int(kind), name, number
        record["start_ns"] = (1000 + 100 * number + begin) * MS
        record["duration_ns"] = (end - begin) * MS
        record["flags"] = flags * (number == step)
    taken = [
        StackSample(*(int((1000 + 100 * step + each) * MS) for each in sample), "a.py:1 in f")
        for sample in samples
    ]
    statistics = RankStatistics()
    # Most samples are not in the steps of the first call.
    for part in np.split(records, [len(STEP) * 4]):
        statistics.add_records(part, assemble_steps(part), NAMES, 0, taken)
    found = save_and_load(statistics).sums_of_typical_steps().lines
    assert all(key.endswith(" at a.py:1 in f") for key in found)
    return {key.partition(" at ")[0]: count for key, count in found.items()}


@pytest.mark.parametrize(
    ("sample", "parts"),
    [
        ((11, 19), {"host"}),
        ((85, 99), {"host"}),
        ((1, 9), {"data"}),
        ((50, 52), {"host", 'section "log"'}),
        ((43, 47), {"host", 'section "log"', 'section "mean"'}),
        ((21, 29), set()),
        ((9, 11), set()),
        ((28, 32), set()),
        ((99, 101), set()),
    ],
)
def test_sample_counts_in_the_part_that_encloses_it(
    sample: tuple[float, float], parts: set[str]
) -> None:
    assert lines_of(sample) == dict.fromkeys(parts, 1)
    assert lines_of(*[sample] * 3) == dict.fromkeys(parts, 3)


def test_samples_of_other_than_typical_steps_do_not_count() -> None:
    """Such steps are the warm-up, and steps that evaluate."""
    assert lines_of((85, 99), step=2) == {}
    assert lines_of((85, 99), flags=int(Flag.EVALUATION)) == {}
    assert Counter(lines_of((85, 99), step=5)) == {"host": 1}
