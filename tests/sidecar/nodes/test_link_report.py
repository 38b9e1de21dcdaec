"""Tests that node 0 finds a slow link that no node can find alone, from link reports."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.analysis.collectives.test_slow_link import COLUMNS, ROWS, TRANSFER_US, job
from tests.sidecar.test_job import two_nodes
from tests.support.collectives import US
from torchlens_perf.analysis.collectives.slow_link import (
    MIN_OPERATIONS,
    LinkStatistics,
    find_slow_links,
    merge_links,
)
from torchlens_perf.sidecar import alerts
from torchlens_perf.sidecar.alerts import SlowLinkMonitor
from torchlens_perf.sidecar.nodes import link_report
from torchlens_perf.sidecar.nodes.messages import MAX_LINKS_BYTES
from torchlens_perf.verdicts.node_state import NodeState

PAIRS = [(0, 2), (0, 3), (1, 2), (1, 3)]


def rows_of(*groups: tuple[int, ...], slow: tuple[int, ...] = ()) -> list[LinkStatistics]:
    return job({"x": groups}, {slow: 3.0} if slow else None)


def test_link_rows_with_enough_operations_are_sent() -> None:
    rows = job({"mesh_tp": ROWS, "mesh_dp": COLUMNS})
    packed, left_out = link_report.encode_link_report(
        3, [*rows, structs.replace(rows[0], transfers=MIN_OPERATIONS - 1)]
    )

    assert sorted(map(str, link_report.decode_link_report(packed, 3, 16))) == sorted(map(str, rows))
    assert link_report.decode_link_report(packed, 4, 16) == []
    assert left_out == 0
    assert len(packed) < 100 * len(rows)


def test_link_rows_over_the_size_limit_are_counted() -> None:
    """The rows with the longest time are sent."""
    (row,) = rows_of((0, 1))
    many = [
        structs.replace(
            row,
            key=structs.replace(row.key, group=f"{zlib.crc32(b'%d' % number):x}"),
            joined=100 + number,
        )
        for number in range(3000)
    ]
    packed, left_out = link_report.encode_link_report(0, many)
    found = link_report.decode_link_report(packed, 0, 2)

    assert len(packed) <= MAX_LINKS_BYTES
    assert 0 < left_out == len(many) - len(found)
    assert min(each.joined for each in found) == 100 + left_out


@pytest.mark.parametrize(
    "changed",
    [
        {"transfer_ns": (0.0, math.nan, 1.0)}, {"wait_ns": -1.0}, {"joined": -1}, {"pair": (0, 99)}, {"ranges": ""},
        {"ranges": "0-x"}, {"ranges": "0-999999999999"}, {"octave": 70},
    ],
)  # fmt: skip
def test_invalid_link_rows_raise_an_error(changed: dict[str, object]) -> None:
    (row,) = rows_of((0, 1))
    of_key = {name: value for name, value in changed.items() if name in row.key.__struct_fields__}
    of_row = {name: value for name, value in changed.items() if name not in of_key}
    wrong = structs.replace(row, key=structs.replace(row.key, **of_key), **of_row)
    data = zlib.compress(msgspec.msgpack.encode((0, [wrong])))

    with pytest.raises(ValueError, match=r"\S"):
        link_report.decode_link_report(data, 0, 16)


@given(st.binary(max_size=300))
def test_invalid_link_report_bytes_raise_an_error(data: bytes) -> None:
    """Invalid bytes include compressed data of other kinds and data that expands too much."""
    for each in (data, zlib.compress(data), zlib.compress(bytes(1 << 22))):
        with pytest.raises(ValueError, match=r"\S"):
            link_report.decode_link_report(each, 0, 16)


def test_group_over_several_nodes_is_merged_into_one() -> None:
    """The merged group has the shorter of the nodes' transfer times."""
    (ours,), (theirs,) = rows_of((0, 1)), rows_of((0, 1), slow=(0, 1))
    theirs = structs.replace(theirs, wait_ns=1000.0, joined=ours.joined - 1)
    (both,) = merge_links([[theirs], [structs.replace(ours, wait_ns=0.0)]])

    assert both.transfer_ns == ours.transfer_ns
    assert both.joined == ours.joined
    assert (both.waits, both.wait_ns) == (2 * ours.waits, 500.0)


def test_result_is_the_same_without_early_rejection_of_candidates() -> None:
    for count in (3, 4, 5, 8):
        groups = [(2 * number, 2 * number + 1) for number in range(count)]
        found = find_slow_links(rows_of(*groups, slow=groups[-1]))
        assert [link.ranks for link in found.links] == [groups[-1]]
        assert found.links[0].peers_transfer_ns == pytest.approx(TRANSFER_US * US, rel=0.1)


def test_node_0_finds_the_slow_link_from_reports_of_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has only two groups of its own, which are too few to compare.

    Node 0 ignores invalid reports and reports of other attempts.
    """
    wire, views = two_nodes(tmp_path)
    views[0].update(1.0)
    rows = {"node-0": rows_of(*PAIRS[:2]), "node-1": rows_of(*PAIRS[2:], slow=PAIRS[3])}
    monkeypatch.setattr(alerts, "build_link_statistics", lambda host: rows[host])
    verdicts = []
    for view, host in zip(reversed(views), ("node-1", "node-0"), strict=True):
        state = NodeState(host)
        monkeypatch.setattr(state.join, "operations", lambda host=host: host)
        verdicts.append(
            SlowLinkMonitor().update_verdict(state, view.cluster, view.job, 0.0, final=False)
        )
    alone, found = verdicts

    assert alone is None
    assert found is not None
    assert found.evidence.found.links[0].ranks == PAIRS[3]
    (whole,) = wire.links.values()
    for other in (link_report.encode_link_report(1, rows["node-1"])[0], whole[:-9], b""):
        wire.links = {"node-1": other}
        assert (
            SlowLinkMonitor().update_verdict(
                state, views[0].cluster, views[0].job, 0.0, final=False
            )
            is None
        )
