"""Tests of the slices of a job with roles, for a timeline."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import pytest

from tests.roles.test_report import RECORDED
from torchlens_perf.roles.slices import PATH, read_slices
from torchlens_perf.roles.table import read_iterations
from torchlens_perf.run.directory import RunDirectory


def test_each_process_has_slices_that_do_not_overlap_in_a_row() -> None:
    run = RunDirectory(RECORDED / "slow_engine")
    recorded, iterations = read_iterations(run, [])
    rows: dict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)
    for process, row, found in read_slices(run, [], 0, 5):
        rows[process, row].append(found)

    assert {process for process, _ in rows} == {PATH, *recorded.roles}
    for slices in rows.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(slices))
    whole = sum(end - begin for begin, end, _ in rows[PATH, 0])
    assert whole / 1e9 == pytest.approx(sum(each.seconds for each in iterations))
    assert sum(end - begin for begin, end, _ in rows[PATH, 1]) == pytest.approx(whole, abs=999)
    assert rows["engine-1", 3], "an engine generates four samples at once"
    first_ns = rows[PATH, 0][0][0]
    assert first_ns == round(iterations[0].begin_s * 1e9) + 5
    later = list(read_slices(run, [], first_ns + 10**9, 5))
    assert later
    assert all(begin_ns >= first_ns + 10**9 for _, _, (begin_ns, _, _) in later)


def test_job_without_roles_has_no_slices(tmp_path: Path) -> None:
    assert not list(read_slices(RunDirectory(tmp_path), [], 0, 0))
