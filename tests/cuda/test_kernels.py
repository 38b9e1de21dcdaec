"""CUDA kernels compiled for the CPU, compared bit for bit with the same algorithms in NumPy.

Several thread schedules are tested. The NumPy functions are called twins of the kernels.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.device import twins
from tests.support.device.shim_kernels import (
    COMPILER,
    KERNELS,
    UNDEFINED_BEHAVIOUR,
    WITHOUT_COMPILER,
    ShimKernels,
    compile_kernels,
)
from torchlens_perf.cuda import reduction
from torchlens_perf.cuda.reduction import (
    BUCKETS,
    SUM_ROW,
    ExactColumn,
    LargestColumn,
    ReducedWindow,
    SumColumn,
)
from torchlens_perf.run.sketch import PER_OCTAVE, Sketch, bucket_bounds

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER)
SCHEDULES = (0, 1, 2, 3)
Durations = npt.NDArray[np.uint64]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the kernels, compiled with checks for undefined behaviour."""
    return compile_kernels(tmp_path_factory.mktemp("kernels") / "kernels.so", *UNDEFINED_BEHAVIOUR)


@pytest.fixture(params=SCHEDULES)
def kernels(request: pytest.FixtureRequest, library: Path) -> ShimKernels:
    """Return the kernels with one schedule of threads."""
    return ShimKernels(library, request.param)


def reduce_by_kernel(
    kernels: ShimKernels,
    start_ns: Durations,
    duration_ns: Durations,
    head: npt.NDArray[np.uint32],
    tail: npt.NDArray[np.uint32],
) -> ReducedWindow:
    """Return the kernel's rows.

    The rows contain garbage before the call, so the kernel must fill them.
    """
    slots, places = duration_ns.shape
    shapes = ((slots, SUM_ROW), (slots, len(LargestColumn)), (slots, len(ExactColumn)))
    reduced = ReducedWindow(*(np.full(shape, -77, np.int64) for shape in shapes))
    kernels.launch(
        "reduce_window",
        slots,
        256,
        [
            start_ns,
            duration_ns,
            head,
            tail,
            reduction.mantissa_bounds(),
            *reduced,
            np.uint32(places - 1),
        ],
        shared_bytes=8 * places,
    )
    return reduced


def check_reduction(
    kernels: ShimKernels, duration_ns: Durations, head: list[int], tail: list[int]
) -> ReducedWindow:
    """Reduce rings by kernel and by NumPy, require equal results, and return the results."""
    start_ns = np.arange(1 << 60, (1 << 60) + duration_ns.size, dtype=np.uint64).reshape(
        duration_ns.shape
    )
    heads, tails = np.array(head, np.uint32), np.array(tail, np.uint32)
    wanted = twins.reduce_window(start_ns, duration_ns, heads, tails)
    found = reduce_by_kernel(kernels, start_ns, duration_ns, heads, tails)
    for name, kernel, twin in zip(ReducedWindow._fields, found, wanted, strict=True):
        np.testing.assert_array_equal(kernel, twin, err_msg=name)
    np.testing.assert_array_equal(tails, heads, err_msg="what was reduced is marked as read")
    return found


def some_durations(shape: tuple[int, int], seed: int) -> Durations:
    """Return durations from below the first to above the last bucket, with ties and bounds."""
    random = np.random.default_rng(seed)
    durations = np.exp(random.uniform(np.log(30), np.log(1e13), shape)).astype(np.uint64)
    bounds = bucket_bounds()[random.integers(0, BUCKETS, shape)].astype(np.uint64)
    kind = random.integers(0, 5, shape)
    return np.select(
        [kind == 0, kind == 1, kind == 2],
        [bounds, bounds + np.uint64(1), durations[:1, :1]],
        durations,
    )


def to_sketch(sums: npt.NDArray[np.int64], largest: npt.NDArray[np.int64]) -> Sketch:
    """Return a row of sums and a row of largest values as a sketch."""
    if not sums[SumColumn.COUNT]:
        return Sketch()
    limbs = (
        int(sums[limb]) for limb in (SumColumn.SQUARES_0, SumColumn.SQUARES_1, SumColumn.SQUARES_2)
    )
    squares = sum(limb << (32 * place) for place, limb in enumerate(limbs))
    extremes = -int(largest[LargestColumn.MINUS_SMALLEST]), int(largest[LargestColumn.NS])
    counts = sums[len(SumColumn) :]
    first, *_, last = np.flatnonzero(counts).repeat(2).tolist()
    return Sketch.from_numbers(
        [int(sums[SumColumn.NS]), squares, *extremes, first, *counts[first : last + 1].tolist()]
    )


def test_kernel_constants_equal_those_of_the_numpy_version() -> None:
    source = KERNELS.read_text()
    defined = {name: int(value) for name, value in re.findall(r"#define (\w+) (\d+)\n", source)}
    assert (defined["SUBDIVISIONS"], defined["BUCKETS"]) == (PER_OCTAVE, BUCKETS)
    assert defined["FIRST_BOUND"] == bucket_bounds()[0]
    for prefix, columns in (("SUM", SumColumn), ("MAX", LargestColumn), ("EXACT", ExactColumn)):
        fields = re.search(rf"enum {{ ((?:{prefix}_\w+, )+){prefix}_FIELDS }};", source)
        assert fields is not None
        names = [
            name.removeprefix(f"{prefix}_") for name in fields[1].removesuffix(", ").split(", ")
        ]
        assert names == [column.name for column in columns]


@pytest.mark.parametrize("places", [2, 64, 512, 2048])
def test_kernel_reduces_windows_of_any_length_like_the_numpy_version(
    kernels: ShimKernels, places: int
) -> None:
    """Windows are empty, odd, full, or longer than the ring. In some, the counter restarts at 0.

    Records above the ring's size are counted as lost, and one record of a full ring is not read.
    """
    counts = [0, 1, 2, 3, places // 2 + 1, places, places + 1, 3 * places]
    tails = [0, 5, 77, 2**32 - 2, 2**32 - places // 2 - 1, 11, 2**32 - 1, 4]
    heads = [(tail + count) % 2**32 for tail, count in zip(tails, counts, strict=True)]
    found = check_reduction(
        kernels, some_durations((len(counts), places), seed=places), heads, tails
    )
    assert found.sums[:, SumColumn.COUNT].tolist() == [min(count, places - 1) for count in counts]
    assert found.sums[:, SumColumn.LOST].tolist() == [
        max(0, count - places + 1) for count in counts
    ]


@pytest.mark.parametrize("shape", [(64, 64), (32, 512)])
def test_kernel_reduces_many_distinct_durations_like_the_numpy_version(
    kernels: ShimKernels, shape: tuple[int, int]
) -> None:
    """With distinct durations, median and deviation depend on each comparison of the sort."""
    durations = np.random.default_rng(1).integers(100, 10**9, shape).astype(np.uint64)
    check_reduction(kernels, durations, [shape[1] - 1] * shape[0], [0] * shape[0])


def test_second_reduction_counts_new_spans_only(kernels: ShimKernels) -> None:
    durations = some_durations((2, 64), seed=4)
    check_reduction(kernels, durations, [40, 7], [0, 0])
    found = check_reduction(kernels, durations, [64, 7], [40, 7])
    assert found.sums[:, SumColumn.COUNT].tolist() == [24, 0]


def test_kernel_reduces_equal_and_extreme_durations_like_the_numpy_version(
    kernels: ShimKernels,
) -> None:
    """The durations have no spread, or the largest sum and squares that fit."""
    durations = np.full((4, 128), 12345, np.uint64)
    durations[1] = 0
    durations[2] = 2**47 + 1
    durations[3, ::2] = 2**55 - 1
    found = check_reduction(kernels, durations, [127] * 4, [0] * 4)
    assert found.exact[0, ExactColumn.MAD] == 0
    squares = [
        int(found.sums[2, limb])
        for limb in (SumColumn.SQUARES_0, SumColumn.SQUARES_1, SumColumn.SQUARES_2)
    ]
    assert sum(limb << 32 * place for place, limb in enumerate(squares)) == 127 * (2**47 + 1) ** 2


def test_duration_on_a_bucket_bound_counts_in_the_lower_bucket(kernels: ShimKernels) -> None:
    """The next integer counts in the following bucket."""
    bounds = bucket_bounds()[:BUCKETS].astype(np.uint64)
    durations = np.zeros((2, 2048), np.uint64)
    durations[0, :BUCKETS], durations[1, :BUCKETS] = bounds, bounds + np.uint64(1)
    found = check_reduction(kernels, durations, [BUCKETS] * 2, [0] * 2)
    counts = found.sums[:, len(SumColumn) :].sum(axis=0)
    assert counts[0] == 1
    assert counts[1:-1].tolist() == [2] * (BUCKETS - 2)
    # The bound itself, the integer after the previous bound, and the duration beyond all bounds.
    assert counts[-1] == 3


def test_merged_rows_equal_a_sketch_of_all_durations(kernels: ShimKernels) -> None:
    """Rows of two ranks and two windows are merged by SUM and MAX."""
    rows, whole = [], Sketch()
    for seed in range(4):
        durations = np.minimum(
            some_durations((3, 256), seed), np.uint64(bucket_bounds()[BUCKETS - 1])
        )
        rows.append(check_reduction(kernels, durations, [200 + seed] * 3, [0] * 3))
        whole.add(durations[1, : 200 + seed].astype(np.int64))
    sums = np.sum([row.sums for row in rows], axis=0)
    largest = np.max([row.largest for row in rows], axis=0)
    assert to_sketch(sums[1], largest[1]).to_numbers() == whole.to_numbers()


def test_reduction_of_no_durations_is_an_empty_sketch(kernels: ShimKernels) -> None:
    """Merging an empty sketch changes nothing."""
    found = check_reduction(kernels, some_durations((1, 8), 0), [3], [3])
    assert to_sketch(found.sums[0], found.largest[0]).to_numbers() == Sketch().to_numbers()


def test_quantiles_of_merged_rows_equal_those_of_the_numpy_version(kernels: ShimKernels) -> None:
    """Histograms have few, many, no, or one filled bucket. One case has very many slots."""
    random = np.random.default_rng(3)
    sums = np.zeros((9, SUM_ROW), np.int64)
    histograms = (random.random((9, BUCKETS)) < 0.03) * random.integers(1, 10**6, (9, BUCKETS))
    histograms[4] = 0
    histograms[5] = 0
    histograms[5, -1] = 3
    histograms[6] = 0
    histograms[6, 0] = 1
    histograms[7] = 1
    sums[:, len(SumColumn) :] = histograms
    sums[:, SumColumn.COUNT] = histograms.sum(axis=1)
    parts = np.array([0, 1, 6554, 32768, 58982, 64881, 65536], np.uint32)
    buckets = np.full((9, len(parts)), -9, np.int32)
    kernels.launch(
        "merged_quantiles", 3, 128, [sums, np.int32(9), parts, np.int32(len(parts)), buckets]
    )
    np.testing.assert_array_equal(buckets, twins.merged_quantiles(sums, parts))
    assert (buckets[4] == -1).all()
    assert (buckets[5] == BUCKETS - 1).all()
    assert buckets[7, 3] == BUCKETS // 2  # Place 575.5 of 1152, rounded up.


def score_by_kernel(
    kernels: ShimKernels, times_ns: npt.NDArray[np.int64], threads: int
) -> twins.Scores:
    """Return the kernel's scores."""
    ranks, slots = times_ns.shape
    scores = twins.Scores(np.full((slots, 2), np.nan, np.float32), np.zeros(ranks, np.uint64))
    arguments = [times_ns, np.int32(ranks), np.int32(slots), np.float32(0.01), *scores]
    kernels.launch("rank_scores", slots, threads, arguments, shared_bytes=4 * ranks)
    return scores


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 333, 1000])
def test_slowness_scores_of_ranks_equal_those_of_the_numpy_version(
    kernels: ShimKernels, ranks: int
) -> None:
    """Cases are one slow rank, no spread, ranks without a time (not fast ones), and no time."""
    random = np.random.default_rng(ranks)
    times_ns = (np.exp(random.normal(0, 0.05, (ranks, 6))) * 5e6).astype(np.int64)
    slow = ranks // 2
    times_ns[slow, 1] *= 3
    times_ns[:, 2] = 5 * 10**12
    times_ns[random.random(ranks) < 0.6, 3] = 0
    times_ns[:, 4] = 0
    times_ns[:, 5] = 10**6 + random.integers(0, 2, ranks)
    found, wanted = score_by_kernel(kernels, times_ns, 512), twins.rank_scores(times_ns, 0.01)
    np.testing.assert_array_equal(found.middle.view(np.uint32), wanted.middle.view(np.uint32))
    np.testing.assert_array_equal(found.worst, wanted.worst)
    if ranks >= twins.FEWEST_RANKS:
        assert int(found.worst[slow] & np.uint64(0xFFFFFFFF)) == 1
        assert int(np.argmax(found.worst)) == slow
    else:
        assert not found.worst.any()


def test_stamp_closes_one_section_and_opens_the_next(kernels: ShimKernels) -> None:
    """Three successive sections need four stamps. A section without a start leaves no record."""
    slots, places = 3, 4
    opened, head = np.zeros(slots, np.uint64), np.zeros(slots, np.uint32)
    start_ns, duration_ns = (
        np.zeros((slots, places), np.uint64),
        np.zeros((slots, places), np.uint64),
    )

    def stamp(close: int, open_: int) -> None:
        arguments = [
            opened,
            start_ns,
            duration_ns,
            head,
            np.int32(close),
            np.int32(open_),
            np.uint32(places - 1),
        ]
        kernels.launch("stamp", 1, 32, arguments)

    stamp(2, -1)
    assert not head.any()
    for _ in range(5):  # The test writes more records than the ring can hold.
        stamp(-1, 0)
        stamp(0, 1)
        stamp(1, 2)
        stamp(2, -1)
    assert head.tolist() == [5, 5, 5]
    assert not opened.any()
    assert (duration_ns == 1).all()  # The test's clock advances by one at each reading.
    assert (start_ns[1] == start_ns[0] + 1).all()
    assert (np.diff(np.sort(start_ns[0])) == 4).all()


def test_section_has_no_negative_time_if_the_clock_steps_back(kernels: ShimKernels) -> None:
    """The unsigned difference of the two times would be six hundred years."""
    opened, head = np.zeros(1, np.uint64), np.zeros(1, np.uint32)
    start_ns, duration_ns = np.zeros((1, 4), np.uint64), np.full((1, 4), 7, np.uint64)
    times = iter([1000, 900])
    kernels.set_clock(lambda: next(times))
    for close, open_ in ((-1, 0), (0, -1)):
        arguments = [
            opened,
            start_ns,
            duration_ns,
            head,
            np.int32(close),
            np.int32(open_),
            np.uint32(3),
        ]
        kernels.launch("stamp", 1, 32, arguments)
    kernels.set_clock(None)
    assert head[0] == 1
    assert (start_ns[0, 0], duration_ns[0, 0]) == (1000, 0)
