"""Tests of summaries for node 0: unpacking, size limits, and equal verdicts."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import progress as ranks
from tests.support.planted import Job, part_of, wider
from torchlens_perf.analysis.collectives.device_progress import LastDeviceMark, RankProgress
from torchlens_perf.analysis.statistics.modules import MAX_MODULES, digest_names
from torchlens_perf.analysis.statistics.step_bins import BinBatch
from torchlens_perf.run.clock import DeviceMark
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.nodes.summary import GROUPS, INSIDE, MAX_BYTES, ROWS
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.words.hang import device_place_from_mark

PLACE = Placement(
    "node-a",
    "0123456789ab/pipeline12",
    {"dp_replicate": 3, "dp_shard_cp": 7, "pipeline": 12, "tp": 65535},
)
JOB = Job.of(3, 60).slow(1, 20, "data")


def made_summary(
    number: int = 5, rows: BinBatch | None = None, place: Placement = PLACE, **changed: Any
) -> bytes:
    values: dict[str, Any] = {"set": 2, "age_s": 1.5, "world_size": 8, "place": place, "rows": rows}
    if "progress" not in changed:
        changed["progress"] = dataclasses.replace(ranks.rank(number), operations={})
    return summary.pack_summary(**{**values, **changed})


def received(*summaries: bytes) -> np.ndarray:
    return summary.unpack_summaries(summaries)


def pack_and_unpack(sent: RankProgress) -> RankProgress:
    """Pack and unpack a rank's progress."""
    (value,) = received(made_summary(progress=sent))
    return summary.unpack_progress(np.array([value]), [sent.host], [0.0])[0]


def assert_close(found: RankProgress, expected: RankProgress) -> None:
    """Compare two values. Compare seconds with the precision of 32-bit floats."""
    for field in dataclasses.fields(RankProgress):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        assert mine == (pytest.approx(theirs, rel=1e-3) if isinstance(theirs, float) else theirs), (
            field.name
        )


class TestSize:
    def test_summary_size_is_the_same_for_all_ranks(self) -> None:
        """A full summary is as large as one without rows, and fits into a post."""
        empty = summary.pack_summary(ranks.rank(0, issued={}, inside=()), Placement(), 1)
        full = made_summary(
            rows=JOB.rows_of(0), modules_ns={f"layers.{i}": 1e6 for i in range(100)}
        )
        sizes = {len(empty), len(full)}

        assert sizes == {summary.LAYOUT.itemsize}
        assert max(sizes) <= MAX_BYTES

    def test_summaries_of_other_versions_and_sizes_are_recognised(self) -> None:
        good = made_summary()
        assert summary.has_current_format(good)
        assert len(summary.unpack_summaries([good, good])) == 2
        assert len(summary.unpack_summaries([])) == 0
        # An earlier version may have had the same size.
        for version in (summary.VERSION + 1, summary.VERSION - 1):
            other = struct.pack("<H", version) + good[2:]
            assert not summary.has_current_format(other)
        for wrong in (good[:-1], good + b"\0", b""):
            assert not summary.has_current_format(wrong)


class TestPlaceAndProgress:
    def test_unpacked_placement_equals_the_packed_one(self) -> None:
        """A rank's population and position are the same on node 0 as on the rank's own node."""
        (value,) = received(made_summary())

        assert summary.unpack_placement(value, "node-a") == PLACE
        assert (value["set"], value["world_size"], value["ended"]) == (2, 8, 0)
        assert received(made_summary(ended=True))[0]["ended"] == 1

    def test_mesh_dimensions_beyond_six_are_cut_off(self) -> None:
        names = ("dp_replicate", "dp_shard_cp", "pp", "tp", "ep", "cp", "more")
        place = Placement("", "", {name: i for i, name in enumerate(names)})
        (value,) = received(made_summary(place=place))

        assert summary.unpack_placement(value, "").coordinates == {
            name: i for i, name in enumerate(names[:6])
        }

    def test_unpacked_progress_equals_the_packed_one(self) -> None:
        """Missing values are still missing after unpacking."""
        for sent in (
            ranks.rank(5),
            ranks.behind(
                6, state="stopped", issued={"0": 0, "mesh_dp_cp": 4_000_000_000}, since_mark_s=None
            ),
            ranks.rank(
                7,
                step=(1 << 32) - 1,
                usual_step_s=0.0,
                inside=(),
                issued={},
                all_groups=False,
                since_mark_s=0.0,
            ),
        ):
            found = pack_and_unpack(sent)
            # A summary stores this value in 16 bits.
            assert found.usual_step_s == pytest.approx(sent.usual_step_s, rel=1e-3)
            operations = sent.operations if sent.issued.get("0") else {}
            assert_close(
                found,
                dataclasses.replace(sent, operations=operations, usual_step_s=found.usual_step_s),
            )

    @pytest.mark.parametrize("step", [100, 99, 36, 0])
    @pytest.mark.parametrize(
        ("kind", "is_end"), [(0, False), (Kind.FORWARD, True), (Kind.BACKWARD, False)]
    )
    def test_unpacked_device_mark_equals_the_packed_one(
        self, step: int, kind: int, is_end: bool
    ) -> None:
        sent = ranks.rank(
            5,
            device=device_place_from_mark(
                DeviceMark(step, 7, kind, 0, is_end, 0, 2_500_000_000), ""
            ),
        )

        assert_close(pack_and_unpack(sent), sent)

    def test_module_name_of_a_device_mark_is_not_sent(self) -> None:
        mark = DeviceMark(99, 65535, int(Kind.MODULE), 3, True, 0, 10**18)
        found = pack_and_unpack(
            ranks.rank(5, device=device_place_from_mark(mark, "blocks.3"))
        ).device

        assert found is not None
        assert (found.step, found.place, found.mark) == (99, 65535, "the end of a module")
        assert found.stood_s == pytest.approx(65504.0), "the largest value of 16 bits"

    def test_last_operations_are_sent(self) -> None:
        """Names that this version does not know, and older operations, are missing."""
        names = {50: "broadcast", 54: "broadcast", 55: "new_operation", 56: "barrier", 57: "gather"}
        sent = ranks.rank(5, issued={"a": 57, "b": 3}, operations={"a": names, "b": {3: "new"}})

        assert pack_and_unpack(sent).operations == {
            "a": {54: "broadcast", 56: "barrier", 57: "gather"}
        }

    def test_summary_with_an_unknown_operation_is_invalid(self) -> None:
        values = received(made_summary(), made_summary()).copy()
        values["operations"][1, 0, 0] = 200

        assert summary.find_valid_summaries(values).tolist() == [True, False]

    @pytest.mark.parametrize(("step", "place"), [(101, 0), (99, 65536), (-65436, 3)])
    def test_device_mark_out_of_range_is_not_sent(self, step: int, place: int) -> None:
        assert (
            pack_and_unpack(ranks.rank(5, device=LastDeviceMark(step, place, "", 1.0))).device
            is None
        )

    def test_unpacked_kernel_counts_equal_the_packed_ones(self) -> None:
        """Missing values are still missing. Large distances are limited."""
        issued = {"a": 900, "b": 57, "c": 5, "d": 4}
        sent = ranks.rank(5, issued=issued, began={"a": 3, "b": 57, "c": 4}, operations={})

        assert pack_and_unpack(sent).began == {"a": 900 - 254, "b": 57, "c": 4}

    def test_age_of_a_summary_is_added_to_its_times(self) -> None:
        (value,) = received(made_summary())
        found = summary.unpack_progress(np.array([value]), ["node-c"], [4.0])[0]

        assert (found.report_age_s, found.host) == (4.0, "node-c")
        assert found.since_step_s == pytest.approx(ranks.SINCE_S + 4.0)

    def test_most_used_groups_are_sent_if_not_all_fit(self) -> None:
        """The summary reports that groups are missing."""
        issued = {f"g{i}": i for i in range(GROUPS + 2)}
        found = pack_and_unpack(ranks.rank(0, issued=issued))

        assert found.issued == {f"g{i}": i for i in range(2, GROUPS + 2)}
        assert not found.all_groups
        assert pack_and_unpack(ranks.rank(0, issued=dict(list(issued.items())[:GROUPS]))).all_groups

    def test_outermost_and_innermost_spans_are_sent_if_not_all_fit(self) -> None:
        inside = tuple(f"span {i}" for i in range(INSIDE + 3))

        assert pack_and_unpack(ranks.rank(0, inside=inside)).inside == (
            inside[0],
            *inside[-INSIDE + 1 :],
        )
        assert pack_and_unpack(ranks.rank(0, inside=inside[:INSIDE])).inside == inside[:INSIDE]

    def test_long_names_are_cut_between_characters(self) -> None:
        found = pack_and_unpack(
            ranks.rank(0, inside=("x" * 99, "ä" * 99, "界" * 99), issued={"グループ" * 9: 5})
        )

        assert found.inside == ("x" * 16, "ä" * 8, "界" * 5)
        assert found.issued == {"グループ": 5}
        (value,) = received(made_summary(place=Placement("", "y" * 43 + "ä", {"ééééééé": 1})))
        assert summary.unpack_placement(value, "") == Placement("", "y" * 43, {"éééééé": 1})

    def test_process_state_without_a_code_is_unpacked_as_unknown(self) -> None:
        assert pack_and_unpack(ranks.rank(0, state="hibernating")).state == "unknown"

    @given(
        st.text(max_size=70),
        st.dictionaries(st.text(max_size=20), st.integers(0, 65535), max_size=8),
        st.lists(st.text(max_size=20), max_size=8),
    )
    def test_unpacking_accepts_any_names(
        self, population: str, coordinates: dict[str, int], inside: list[str]
    ) -> None:
        sent = ranks.rank(1, inside=tuple(inside), issued=dict(coordinates))
        (value,) = received(
            made_summary(place=Placement("", population, coordinates), progress=sent)
        )

        place = summary.unpack_placement(value, "")
        assert population.startswith(place.population)
        assert len(place.coordinates) <= len(coordinates)
        assert len(summary.unpack_progress(np.array([value]), [""], [0.0])[0].inside) <= INSIDE


class TestRows:
    def test_rows_are_split_into_several_summaries(self) -> None:
        """All rows arrive once and in order."""
        rows = wider(JOB.rows_of(1), 2)
        windows = list(summary.split_rows(rows))

        assert [len(each) for each in windows] == [8, 8, 8, 6]
        assert {each.width for each in windows} == {2}
        for field in dataclasses.fields(BinBatch):
            if field.name not in ("width", "ranks"):
                joined = np.concatenate([getattr(each, field.name) for each in windows], axis=1)
                np.testing.assert_array_equal(joined, getattr(rows, field.name))

    def test_newest_rows_are_packed_if_not_all_fit(self) -> None:
        ((_, block),) = summary.iter_row_batches(received(made_summary(rows=JOB.rows_of(0))))

        assert block.key.tolist() == [list(range(60 - ROWS, 60))]

    def test_unpacked_rows_equal_the_packed_ones(self) -> None:
        """Times that were not measured are NaN."""
        rows = wider(JOB.rows_of(2, slice(0, 20)), 4)
        rows = dataclasses.replace(rows, flags=np.array([[0, int(Flag.COLLECTED), 1, 256, 8192]]))
        rows = dataclasses.replace(
            rows,
            ready_ns=np.array([[np.nan, 1e6, 0, 5, np.nan]]),
            issue_ready_ns=np.array([[np.nan, 2e6, 0, 5, np.nan]]),
            issue_ns=rows.parts_ns / 2,
            lag_ns=rows.parts_ns * 100,
        )
        ((population, block),) = summary.iter_row_batches(received(made_summary(rows=rows)))

        assert (population, block.width, block.ranks.tolist()) == (PLACE.population, 4, [5])
        assert block.key[0].tolist() == [0, 1, 2, 3, 4, *[-1] * (ROWS - 5)]
        assert block.flags[:, :5].tolist() == rows.flags.tolist()
        for name in ("duration_ns", "wait_ns", "ready_ns", "workload"):
            np.testing.assert_allclose(getattr(block, name)[:, :5], getattr(rows, name), rtol=1e-6)
        # A share of the duration is packed with this resolution.
        share_ns = rows.duration_ns.max() / 16000
        for name, sent in (
            ("parts_ns", rows.parts_ns),
            ("issue_ns", rows.issue_ns),
            ("issue_ready_ns", rows.issue_ready_ns),
        ):
            np.testing.assert_allclose(getattr(block, name)[:, :5], sent, atol=share_ns)
        longest_ns = 4 * rows.duration_ns[:, :, None]
        np.testing.assert_allclose(
            block.lag_ns[:, :5], np.minimum(rows.lag_ns, longest_ns), atol=share_ns
        )

    def test_ranks_of_other_populations_or_row_widths_are_in_separate_blocks(self) -> None:
        """Ranks without rows are in no block."""
        rows = JOB.rows_of(0, slice(0, 8))
        other = Placement("", "other")
        values = received(
            made_summary(1, rows),
            made_summary(2, rows),
            made_summary(3, rows, other),
            made_summary(4, wider(rows, 2)),
            made_summary(6),
        )
        blocks = [
            (name, block.width, block.ranks.tolist())
            for name, block in summary.iter_row_batches(values)
        ]

        assert sorted(blocks) == [
            (PLACE.population, 1, [1, 2]),
            (PLACE.population, 2, [4]),
            ("other", 1, [3]),
        ]
        assert list(summary.iter_row_batches(received(made_summary()))) == []

    def test_module_times_are_unpacked_within_half_a_percent(self) -> None:
        """Times are in the order of the modules' names. A digest identifies the names."""
        times_ns = np.geomspace(1e3, 1e12, MAX_MODULES + 5)
        names = [f"layers.{i:03d}" for i in range(len(times_ns))]
        many = dict(reversed(list(zip(names, times_ns.tolist(), strict=True))))
        values = received(
            made_summary(modules_ns=dict(list(many.items())[-3:])),
            made_summary(modules_ns=many),
            made_summary(),
        )
        found = summary.unpack_module_times(values)

        assert found.shape == (3, MAX_MODULES)
        np.testing.assert_allclose(found[1], times_ns[:MAX_MODULES], rtol=1 / 256)
        np.testing.assert_allclose(found[0, :3], times_ns[:3], rtol=1 / 256)
        assert found[0, 3:].tolist() == [0.0] * (MAX_MODULES - 3)
        assert values["modules"].tolist() == [
            digest_names(names[:3]),
            digest_names(names[:MAX_MODULES]),
            0,
        ]


@pytest.mark.parametrize("per_summary", [ROWS, 7, 1])
def test_verdicts_are_the_same_with_and_without_packing(per_summary: int) -> None:
    """Values differ by less than a hundredth of a percent of the step."""
    direct = JOB.judge()
    judge = StragglerDetector()
    for first in range(0, JOB.rows, per_summary):
        window = slice(first, first + per_summary)
        values = received(
            *(made_summary(rank, JOB.rows_of(rank, window), Placement()) for rank in range(3))
        )
        for population, block in summary.iter_row_batches(values):
            judge.add_bin_batch(population, block)
        judge.judge()
    travelled = judge.judge(final=True)

    assert len(direct.episodes) == 1
    for mine, theirs in zip(travelled.episodes, direct.episodes, strict=True):
        for name, value in dataclasses.asdict(theirs).items():
            assert getattr(mine, name) == (
                pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
            ), name
    assert (travelled.rows, travelled.last_step) == (direct.rows, direct.last_step)
    (mine,), (theirs,) = travelled.usual, direct.usual
    assert (mine.work_ns, mine.wait_ns) == pytest.approx((theirs.work_ns, theirs.wait_ns), rel=1e-4)


def test_rows_of_different_widths_are_compared_however_they_are_split() -> None:
    """A rank may have narrower rows than other ranks. A summary may split the rows anywhere."""
    job, judge = Job.of(3, 120).slow(1, 20, "data"), StragglerDetector()
    for first in range(0, 120, 5):
        for rank in range(3):
            rows = job.rows_of(rank) if rank == 2 else wider(job.rows_of(rank), 4)
            steps = rows.key[0] * rows.width
            at = np.flatnonzero((steps >= first) & (steps < first + 5))
            for population, block in summary.iter_row_batches(
                received(made_summary(rank, part_of(rows, at[0], at[-1] + 1), Placement()))
            ):
                judge.add_bin_batch(population, block)
        judge.judge()
    found = judge.judge(final=True)

    assert (found.rows, [each.rank for each in found.episodes]) == (120 // 4 - 4, [1])
