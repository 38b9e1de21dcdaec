"""What ranks tell node 0: whatever goes in comes out, or is cut where it says so, and the judge cannot tell."""

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
from torchlens_perf.analysis.collectives.device_progress import DevicePlace
from torchlens_perf.analysis.collectives.hang import Progress
from torchlens_perf.analysis.statistics.modules import MAX_MODULES, digest
from torchlens_perf.analysis.statistics.step_bins import StepBins
from torchlens_perf.run.clock import DeviceMark
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.nodes.summary import GROUPS, INSIDE, MAX_BYTES, ROWS, RankSummary
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.words.hang import device_place

PLACE = Placement(
    "node-a", "0123456789ab/pipeline12", {"dp_replicate": 3, "dp_shard_cp": 7, "pipeline": 12, "tp": 65535}
)
JOB = Job.of(3, 60).slow(1, 20, "data")


def told(number: int = 5, rows: StepBins | None = None, place: Placement = PLACE, **changed: Any) -> RankSummary:
    values: dict[str, Any] = {"set": 2, "age_s": 1.5, "world_size": 8, "place": place, "rows": rows}
    if "progress" not in changed:
        changed["progress"] = dataclasses.replace(ranks.rank(number), operations={})
    return RankSummary(**{**values, **changed})


def received(*summaries: RankSummary) -> np.ndarray:
    return summary.unpack([summary.pack(each) for each in summaries])


def back(sent: Progress) -> Progress:
    """What arrives of a rank's progress."""
    (value,) = received(told(progress=sent))
    return summary.progress(np.array([value]), [sent.host], [0.0])[0]


def assert_close(found: Progress, expected: Progress) -> None:
    """Equal, but that seconds are 32-bit floats."""
    for field in dataclasses.fields(Progress):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        assert mine == (pytest.approx(theirs, rel=1e-3) if isinstance(theirs, float) else theirs), field.name


class TestSize:
    def test_it_is_the_same_for_all(self) -> None:
        """A rank without rows and one with everything send as many bytes, and no more than fit into a post."""
        empty = RankSummary(0, 0.0, 1, Placement(), ranks.rank(0, issued={}, inside=()))
        full = told(rows=JOB.rows_of(0), modules_ns={f"layers.{i}": 1e6 for i in range(100)})
        sizes = {len(summary.pack(each)) for each in (empty, full)}

        assert sizes == {summary.LAYOUT.itemsize}
        assert max(sizes) <= MAX_BYTES

    def test_another_version(self) -> None:
        """A summary of another version, a longer or a cut one is refused, also among good ones."""
        good = summary.pack(told())
        assert len(summary.unpack([good, good])) == 2
        assert len(summary.unpack([])) == 0
        for version in (summary.VERSION + 1, summary.VERSION - 1):  # the one before had as many bytes
            other = struct.pack("<H", version) + good[2:]
            assert not summary.is_readable(other)
            with pytest.raises(ValueError, match="version"):
                summary.unpack([good, other])
        for wrong in (good[:-1], good + b"\0", b""):
            with pytest.raises(ValueError, match="size"):
                summary.unpack([good, wrong])


class TestPlaceAndProgress:
    def test_place(self) -> None:
        """Population and position arrive whole, so that ranks of all nodes are the same to the judge as this node's."""
        (value,) = received(told())

        assert summary.place(value, "node-a") == PLACE
        assert (value["set"], value["world_size"], value["ended"]) == (2, 8, 0)
        assert received(told(ended=True))[0]["ended"] == 1

    def test_most_dimensions(self) -> None:
        """Six dimensions arrive; of more, the first six."""
        names = ("dp_replicate", "dp_shard_cp", "pp", "tp", "ep", "cp", "more")
        place = Placement("", "", {name: i for i, name in enumerate(names)})
        (value,) = received(told(place=place))

        assert summary.place(value, "").coordinates == {name: i for i, name in enumerate(names[:6])}

    def test_progress(self) -> None:
        """How far a rank is: groups, spans, state, times; what is not known stays so."""
        for sent in (
            ranks.rank(5),
            ranks.behind(6, state="stopped", issued={"0": 0, "mesh_dp_cp": 4_000_000_000}, since_mark_s=None),
            ranks.rank(
                7, step=(1 << 32) - 1, usual_step_s=0.0, inside=(), issued={}, all_groups=False, since_mark_s=0.0
            ),
        ):
            found = back(sent)
            assert found.usual_step_s == pytest.approx(sent.usual_step_s, rel=1e-3)  # it travels in 16 bits
            assert_close(found, dataclasses.replace(sent, operations={}, usual_step_s=found.usual_step_s))

    @pytest.mark.parametrize("step", [100, 99, 36, 0])
    @pytest.mark.parametrize(("kind", "is_end"), [(0, False), (Kind.FORWARD, True), (Kind.BACKWARD, False)])
    def test_device(self, step: int, kind: int, is_end: bool) -> None:
        """Where the device was last seen, and for how long."""
        sent = ranks.rank(5, device=device_place(DeviceMark(step, 7, kind, 0, is_end, 0, 2_500_000_000), ""))

        assert_close(back(sent), dataclasses.replace(sent, operations={}))

    def test_device_in_a_module(self) -> None:
        """Its name does not travel."""
        mark = DeviceMark(99, 65535, int(Kind.MODULE), 3, True, 0, 10**18)
        found = back(ranks.rank(5, device=device_place(mark, "blocks.3"))).device

        assert found is not None
        assert (found.step, found.place, found.mark) == (99, 65535, "the end of a module")
        assert found.stood_s == pytest.approx(65504.0), "the most that can be told"

    @pytest.mark.parametrize(("step", "place"), [(101, 0), (99, 65536), (-65436, 3)])
    def test_device_that_cannot_be_told(self, step: int, place: int) -> None:
        """Better nothing than a wrong place."""
        assert back(ranks.rank(5, device=DevicePlace(step, place, "", 1.0))).device is None

    def test_kernels(self) -> None:
        """Which collectives' kernels have begun; nothing where nobody tells; of those far behind, that they are."""
        issued = {"a": 900, "b": 57, "c": 5, "d": 4}
        sent = ranks.rank(5, issued=issued, began={"a": 3, "b": 57, "c": 4}, operations={})

        assert back(sent).began == {"a": 900 - 254, "b": 57, "c": 4}

    def test_age(self) -> None:
        """What was told some time ago is so much older."""
        (value,) = received(told())
        found = summary.progress(np.array([value]), ["node-c"], [4.0])[0]

        assert (found.report_age_s, found.host) == (4.0, "node-c")
        assert found.since_step_s == pytest.approx(ranks.SINCE_S + 4.0)

    def test_many_groups(self) -> None:
        """Of more groups than fit, those that were used most are told, and that there are others."""
        issued = {f"g{i}": i for i in range(GROUPS + 2)}
        found = back(ranks.rank(0, issued=issued))

        assert found.issued == {f"g{i}": i for i in range(2, GROUPS + 2)}
        assert not found.all_groups
        assert back(ranks.rank(0, issued=dict(list(issued.items())[:GROUPS]))).all_groups

    def test_deep_spans(self) -> None:
        """Of deeply nested spans, the outermost and the innermost ones."""
        inside = tuple(f"span {i}" for i in range(INSIDE + 3))

        assert back(ranks.rank(0, inside=inside)).inside == (inside[0], *inside[-INSIDE + 1 :])
        assert back(ranks.rank(0, inside=inside[:INSIDE])).inside == inside[:INSIDE]

    def test_long_names(self) -> None:
        """Names are cut to their space, not in the middle of a character."""
        found = back(ranks.rank(0, inside=("x" * 99, "ä" * 99, "界" * 99), issued={"グループ" * 9: 5}))

        assert found.inside == ("x" * 16, "ä" * 8, "界" * 5)
        assert found.issued == {"グループ": 5}
        (value,) = received(told(place=Placement("", "y" * 47 + "ä", {"ééééééé": 1})))
        assert summary.place(value, "") == Placement("", "y" * 47, {"éééééé": 1})

    def test_unknown_state(self) -> None:
        """A state that is not on the list arrives as unknown."""
        assert back(ranks.rank(0, state="hibernating")).state == "unknown"

    @given(
        st.text(max_size=70),
        st.dictionaries(st.text(max_size=20), st.integers(0, 65535), max_size=8),
        st.lists(st.text(max_size=20), max_size=8),
    )
    def test_any_names(self, population: str, coordinates: dict[str, int], inside: list[str]) -> None:
        """Whatever the names are, what was packed can be read."""
        sent = ranks.rank(1, inside=tuple(inside), issued=dict(coordinates))
        (value,) = received(told(place=Placement("", population, coordinates), progress=sent))

        place = summary.place(value, "")
        assert population.startswith(place.population)
        assert len(place.coordinates) <= len(coordinates)
        assert len(summary.progress(np.array([value]), [""], [0.0])[0].inside) <= INSIDE


class TestRows:
    def test_windows(self) -> None:
        """More rows than fit travel in several summaries: all of them, in order, each once."""
        rows = wider(JOB.rows_of(1), 2)
        windows = list(summary.windows(rows))

        assert [len(each) for each in windows] == [8, 8, 8, 6]
        assert {each.width for each in windows} == {2}
        for field in dataclasses.fields(StepBins):
            if field.name != "width":
                joined = np.concatenate([getattr(each, field.name) for each in windows])
                np.testing.assert_array_equal(joined, getattr(rows, field.name))

    def test_too_many_rows(self) -> None:
        """Of more rows than fit, the newest."""
        ((_, block),) = summary.blocks(received(told(rows=JOB.rows_of(0))))

        assert block.key.tolist() == [list(range(60 - ROWS, 60))]

    def test_rows_arrive(self) -> None:
        """Row numbers, flags, times, work by part; what was not measured is still not a number."""
        rows = wider(JOB.rows_of(2, slice(0, 20)), 4)
        rows = dataclasses.replace(rows, flags=np.array([0, int(Flag.COLLECTED), 1, 256, 8192]))
        rows = dataclasses.replace(
            rows,
            ready_ns=np.array([np.nan, 1e6, 0, 5, np.nan]),
            issue_ready_ns=np.array([np.nan, 2e6, 0, 5, np.nan]),
            issue_ns=rows.work_ns / 2,
            lag_ns=rows.work_ns * 100,
        )
        ((population, block),) = summary.blocks(received(told(rows=rows)))

        assert (population, block.width, block.ranks.tolist()) == (PLACE.population, 4, [5])
        assert block.key[0].tolist() == [0, 1, 2, 3, 4, *[-1] * (ROWS - 5)]
        assert block.flags[0, :5].tolist() == rows.flags.tolist()
        for name in ("duration_ns", "wait_ns", "ready_ns", "workload"):
            np.testing.assert_allclose(getattr(block, name)[0, :5], getattr(rows, name), rtol=1e-6)
        share_ns = rows.duration_ns.max() / 16000  # as close as a share of the duration is
        for name, sent in (
            ("parts_ns", rows.work_ns),
            ("issue_ns", rows.issue_ns),
            ("issue_ready_ns", rows.issue_ready_ns),
        ):
            np.testing.assert_allclose(getattr(block, name)[0, :5], sent, atol=share_ns)
        longest_ns = 4 * rows.duration_ns[:, None]
        np.testing.assert_allclose(block.lag_ns[0, :5], np.minimum(rows.lag_ns, longest_ns), atol=share_ns)

    def test_blocks_by_population_and_width(self) -> None:
        """Rows of ranks that are not compared, or of different width, are apart; who has none is in no block."""
        rows = JOB.rows_of(0, slice(0, 8))
        other = Placement("", "other")
        values = received(
            told(1, rows),
            told(2, rows),
            told(3, rows, other),
            told(4, wider(rows, 2)),
            told(6),
        )
        blocks = [(name, block.width, block.ranks.tolist()) for name, block in summary.blocks(values)]

        assert sorted(blocks) == [(PLACE.population, 1, [1, 2]), (PLACE.population, 2, [4]), ("other", 1, [3])]
        assert list(summary.blocks(received(told()))) == []

    def test_modules(self) -> None:
        """Times of modules arrive within half a percent, in their names' order, as many as fit; and of which."""
        times_ns = np.geomspace(1e3, 1e12, MAX_MODULES + 5)
        names = [f"layers.{i:03d}" for i in range(len(times_ns))]
        many = dict(reversed(list(zip(names, times_ns.tolist(), strict=True))))
        values = received(told(modules_ns=dict(list(many.items())[-3:])), told(modules_ns=many), told())
        found = summary.modules_ns(values)

        assert found.shape == (3, MAX_MODULES)
        np.testing.assert_allclose(found[1], times_ns[:MAX_MODULES], rtol=1 / 256)
        np.testing.assert_allclose(found[0, :3], times_ns[:3], rtol=1 / 256)
        assert found[0, 3:].tolist() == [0.0] * (MAX_MODULES - 3)
        assert values["modules"].tolist() == [digest(names[:3]), digest(names[:MAX_MODULES]), 0]


@pytest.mark.parametrize("per_summary", [ROWS, 7, 1])
def test_judged_the_same(per_summary: int) -> None:
    """Findings are those of rows that never travelled, but for a hundredth of a percent of the step."""
    direct = JOB.judged()
    judge = StragglerDetector()
    for first in range(0, JOB.rows, per_summary):
        window = slice(first, first + per_summary)
        values = received(*(told(rank, JOB.rows_of(rank, window), Placement()) for rank in range(3)))
        for population, block in summary.blocks(values):
            judge.add_block(population, block)
        judge.judge()
    travelled = judge.judge(final=True)

    assert len(direct.episodes) == 1
    for mine, theirs in zip(travelled.episodes, direct.episodes, strict=True):
        for name, value in dataclasses.asdict(theirs).items():
            assert getattr(mine, name) == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), name
    assert (travelled.rows, travelled.last_step) == (direct.rows, direct.last_step)
    ((mine,), (theirs,)) = travelled.usual, direct.usual
    assert (mine.work_ns, mine.wait_ns) == pytest.approx((theirs.work_ns, theirs.wait_ns), rel=1e-4)


def test_narrow_rows_travel_in_any_pieces() -> None:
    """A rank with narrower rows than the others is compared all the same, though a summary cuts its rows anywhere."""
    job, judge = Job.of(3, 120).slow(1, 20, "data"), StragglerDetector()
    for first in range(0, 120, 5):
        for rank in range(3):
            rows = job.rows_of(rank) if rank == 2 else wider(job.rows_of(rank), 4)
            at = np.flatnonzero((rows.step >= first) & (rows.step < first + 5))
            for population, block in summary.blocks(
                received(told(rank, part_of(rows, at[0], at[-1] + 1), Placement()))
            ):
                judge.add_block(population, block)
        judge.judge()
    found = judge.judge(final=True)

    assert (found.rows, [each.rank for each in found.episodes]) == (120 // 4 - 4, [1])
