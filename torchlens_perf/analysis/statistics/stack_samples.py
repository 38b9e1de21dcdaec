"""Find in which parts of their steps samples of a rank's stack were taken. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.host_gaps import HostGaps
from torchlens_perf.run.records import StepTable
from torchlens_perf.run.ring import Flag, Kind, lookup_name


class StackSample(NamedTuple):
    """The line of the user's code in which a rank was at a moment between two times."""

    begin_ns: int
    end_ns: int
    line: str
    """Such as "train.py:65 in main"; "" if no line outside libraries is known."""


def find_parts(
    samples: Sequence[StackSample],
    records: npt.NDArray[np.void],
    names: list[str],
    steps: StepTable,
    gaps: HostGaps,
) -> Iterator[tuple[int, str]]:
    """Yield the index of the step, and part and line, of samples in host code or data loading.

    The text is such as "host at train.py:65 in main". The part is "host", "data", or each section
    around a sample in host code. A sample counts only if the whole time in which it was taken is in
    the part.
    """
    spans = records[(records["flags"] & Flag.OTHER_THREAD) == 0]
    for sample in samples:
        is_host = _enclose(sample, gaps.begin_ns, gaps.duration_ns).any()
        around = spans[_enclose(sample, spans["start_ns"], spans["duration_ns"])]
        inside = {
            lookup_name(names, each["name_id"])
            for each in around
            if each["kind"] == (Kind.SECTION if is_host else Kind.DATA)
        }
        parts = ["host", *map('section "{}"'.format, inside)] if is_host else ["data"]
        for at in np.flatnonzero(_enclose(sample, steps.start_ns, steps.duration_ns)).tolist():
            yield from ((at, f"{part} at {sample.line}") for part in parts if is_host or inside)


def _enclose(
    sample: StackSample, begins_ns: npt.NDArray[np.int64], durations_ns: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    return (begins_ns <= sample.begin_ns) & (sample.end_ns <= begins_ns + durations_ns)
