"""Read the progress of a rank of this node from its ring."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.collectives.device_progress import RankProgress
from torchlens_perf.analysis.collectives.semantics import parse_collective_name
from torchlens_perf.run import ring
from torchlens_perf.run.clock import read_device_mark
from torchlens_perf.run.ring import Kind
from torchlens_perf.sidecar.host.stacks import read_process_state
from torchlens_perf.verdicts.words.hang import device_place_from_mark

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.sidecar.rings.source import RingSource


def read_progress(source: RingSource, uncomparable: Collection[str], now_s: float) -> RankProgress:
    """Return the progress of a rank.

    uncomparable: process groups with different sequence numbers on different ranks. now_s:
    CLOCK_MONOTONIC.
    """
    reader, state = source.reader, source.state
    seen = source.progress
    seen.update(reader.read_counter(ring.STEP), reader.read_counter(ring.HEAD), now_s)
    groups = [group for group in reader.read_group_progress() if " peer=" not in group.name]
    numbers = {group.name: group.issued - 1 for group in groups}
    issued = {group: number for group, number in numbers.items() if group not in uncomparable}
    operations, sizes, dtypes = read_operations(reader.read_last_operations(), issued)
    mark = read_device_mark(reader)
    ended = {"died": "dead", "closed": "closed", "failed": "closed"}.get(state.ended)
    return RankProgress(
        rank=state.identity.rank,
        host=state.identity.host,
        step=reader.read_counter(ring.STEP),
        since_step_s=now_s - seen.step_s,
        report_age_s=0.0,
        # With fewer steps, the usual duration is not known.
        usual_step_s=(
            statistics.median(source.durations_ns) / 1e9 if len(source.durations_ns) >= 10 else 0.0
        ),
        issued=issued,
        inside=tuple(span.name for span in reader.read_open_spans()[1:]),
        state=ended or read_process_state(state.identity.pid, state.identity.process_started),
        operations=operations,
        sizes=sizes,
        dtypes=dtypes,
        since_mark_s=now_s - seen.mark_s,
        all_groups=reader.read_counter(ring.GROUPS_USED) < ring.MAX_GROUPS
        and len(issued) == len(numbers),
        began={
            group.name: group.began - 1 for group in groups if group.began and group.name in issued
        },
        passes=count_passes(source.waiting),
        device=device_place_from_mark(*mark) if mark is not None else None,
    )


def read_operations(
    last: Iterable[ring.IssuedOperation], issued: Mapping[str, int]
) -> tuple[dict[str, dict[int, str]], dict[str, int], dict[str, str]]:
    """Return RankProgress.operations, RankProgress.sizes and RankProgress.dtypes."""
    operations: dict[str, dict[int, str]] = {}
    sizes, dtypes = {}, {}
    for each in last:
        name = parse_collective_name(each.name)
        if name is not None and each.group in issued:
            operations.setdefault(each.group, {})[each.sequence] = name.operation
            if each.sequence == issued[each.group]:
                sizes[each.group] = each.bytes
                dtypes[each.group] = name.dtype
    return operations, sizes, dtypes


def count_passes(waiting: Iterable[tuple[npt.NDArray[np.void], object]]) -> int:
    """Return RankProgress.passes. waiting: RingSource.waiting, the records of the newest step."""
    kinds = np.concatenate([records["kind"] for records, _ in waiting] or [np.zeros(0)])
    ends = np.flatnonzero(kinds == Kind.STEP)
    kinds = kinds[ends[-1] + 1 :] if len(ends) else kinds
    return 0 if (kinds == Kind.BACKWARD).any() else int((kinds == Kind.FORWARD).sum())
