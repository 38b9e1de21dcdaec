"""The kernels on the device: bit-equal to their NumPy twins, and close to the limit of memory or
launches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.checks import driver, graph_us, launch, new_ring, stream
from benchmarks.gpu_check.lines import Checks
from tests.support.device import twins
from torchlens_perf.cuda import kernels, reduction
from torchlens_perf.cuda.driver import KernelArguments
from torchlens_perf.cuda.reduction import SUM_ROW, ExactColumn, LargestColumn, SumColumn
from torchlens_perf.cuda.stamps import NO_SLOT

# Number of slots, places in a slot's ring, and stamps in the ring.
WINDOWS = ((16, 64, 64), (64, 128, 100), (64, 1024, 1000), (256, 1024, 1000))
RANKS = ((8, 64), (64, 64), (1024, 64), (16384, 64))
_QUANTILES = np.array([0, 6554, 32768, 58982, 64881, 65536], np.uint32)
MIN_SPREAD = 0.01
# A window is reduced once a second, and merged and scored once in 64 steps. With this limit, each
# kernel takes at most a ten-thousandth of the device's time, or a two-thousandth with steps of 3
# ms. A limit relative to the floor would be too strict: the floor is a launch of some 2 us, but the
# barriers for a median of 1024 times take longer.
MOST_US = 100


def on_device(values: np.ndarray[Any, Any]) -> torch.Tensor:
    """Copy the array's bytes to the device. torch has no arithmetic for unsigned types, but the
    checks need no arithmetic.
    """
    signed = (
        values.view(np.dtype(f"i{values.dtype.itemsize}")) if values.dtype.kind == "u" else values
    )
    return torch.from_numpy(signed.copy()).cuda()


def launch_ours(
    name: str, grid: int, threads: int, arguments: list[Any], shared_bytes: int = 0
) -> None:
    """Launch one of the project's kernels on the current stream. Tensors are passed by address."""
    values = [
        np.uint64(each.data_ptr()) if isinstance(each, torch.Tensor) else each for each in arguments
    ]
    function = kernels.load_kernels(torch.cuda.current_device())[name]
    driver().launch_kernel(function, grid, threads, shared_bytes, stream(), KernelArguments(values))


class Window:
    """A window of random durations on device and host, with ties, and slots whose counters wrap."""

    def __init__(self, slots: int, places: int, stamps: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.slots, self.places = slots, places
        self.duration_ns = np.exp(random.uniform(3, 32, (slots, places))).astype(np.uint64)
        self.duration_ns[::3] = self.duration_ns[::3, :1]
        self.start_ns = random.integers(1 << 60, 1 << 61, (slots, places)).astype(np.uint64)
        self.tail = random.integers(0, 1 << 32, slots).astype(np.uint32)
        self.tail[0] = 2**32 - 3
        self.head = (self.tail + np.uint32(stamps)).astype(np.uint32)
        self.inputs = [on_device(each) for each in (self.start_ns, self.duration_ns, self.head)]
        self.tails, self.tails_before = on_device(self.tail), on_device(self.tail)
        self.bounds = on_device(reduction.mantissa_bounds())
        widths = (SUM_ROW, len(LargestColumn), len(ExactColumn))
        self.rows = [
            torch.full((slots, width), -77, dtype=torch.int64, device="cuda") for width in widths
        ]

    def reduce(self) -> None:
        """Reduce by the kernel."""
        arguments = [*self.inputs, self.tails, self.bounds, *self.rows, np.uint32(self.places - 1)]
        launch_ours("reduce_window", self.slots, 256, arguments, 8 * self.places)

    def again(self) -> None:
        """Run the reduction kernel on the window's unchanged inputs."""
        self.tails.copy_(self.tails_before)
        self.reduce()

    def twin(self) -> reduction.ReducedWindow:
        """Reduce by NumPy."""
        return twins.reduce_window(self.start_ns, self.duration_ns, self.head, self.tail)


def equality(checks: Checks) -> None:
    """Compare every kernel with its NumPy twin, on random inputs and on a chain of stamps."""
    ring = new_ring(slots=4)
    chain = [ring.assign_slot(name) for name in ("a", "b", "c")]
    for _ in range(10):
        for close, open_ in zip((NO_SLOT, *chain), (*chain, NO_SLOT), strict=True):
            ring.enqueue_stamp(close, open_, stream())
    ring.enqueue_reduction(stream())
    torch.cuda.synchronize()
    reduced = ring.collect_result()
    counts = None if reduced is None else reduced.sums[:, SumColumn.COUNT].tolist()
    checks.bar(
        "kernels",
        "stamp, a chain of three sections, ten times",
        str(counts),
        "10 each",
        counts == [10] * 3 + [0],
    )
    for shape in WINDOWS:
        window = Window(*shape, seed=shape[0])
        window.reduce()
        rows = [rows.cpu().numpy() for rows in window.rows]
        judge_equal(checks, f"reduce_window {shape}", rows, window.twin())
        sums = window.rows[0].cpu().numpy()
        buckets = torch.full((shape[0], len(_QUANTILES)), -9, dtype=torch.int32, device="cuda")
        arguments = [
            window.rows[0],
            np.int32(shape[0]),
            on_device(_QUANTILES),
            np.int32(len(_QUANTILES)),
            buckets,
        ]
        launch_ours("merged_quantiles", -(-shape[0] // 4), 128, arguments)
        wanted = twins.merged_quantiles(sums, _QUANTILES)
        judge_equal(checks, f"merged_quantiles {shape}", [buckets.cpu().numpy()], [wanted])
    for ranks, slots in RANKS:
        times_ns = _times(ranks, slots)
        middle, worst = _scores(on_device(times_ns))
        twin = twins.rank_scores(times_ns, MIN_SPREAD)
        same = (middle.cpu().numpy().view(np.uint32), worst.cpu().numpy().view(np.uint64))
        wanted = [twin.middle.view(np.uint32), twin.worst]
        judge_equal(checks, f"rank_scores ({ranks}, {slots})", same, wanted)


def judge_equal(
    checks: Checks,
    what: str,
    ours: Sequence[np.ndarray[Any, Any]],
    twins: Sequence[np.ndarray[Any, Any]],
) -> None:
    """Expect that a kernel's results equal those of its NumPy twin, bit for bit."""
    equal = all(np.array_equal(one, twin) for one, twin in zip(ours, twins, strict=True))
    checks.bar("kernels", what, "bit-equal" if equal else "differs", "equal", equal)


def _times(ranks: int, slots: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(ranks)
    times_ns = (np.exp(random.normal(0, 0.05, (ranks, slots))) * 5e6).astype(np.int64)
    times_ns[ranks // 2, 1] *= 3
    times_ns[random.random(ranks) < 0.2, 3] = 0
    return times_ns


def _scores(times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, slots = times.shape
    kernels.raise_shared_memory_limit(torch.cuda.current_device(), ranks)
    middle = torch.zeros((slots, 2), dtype=torch.float32, device="cuda")
    worst = torch.zeros(ranks, dtype=torch.int64, device="cuda")
    arguments = [times, np.int32(ranks), np.int32(slots), np.float32(MIN_SPREAD), middle, worst]
    launch_ours("rank_scores", slots, 1024, arguments, 4 * ranks)
    return middle, worst


def floors(checks: Checks) -> None:
    """Compare each kernel's time with the larger of two lower bounds (floors).

    The floors are the kernel's bytes divided by the measured bandwidth, and the time of an empty
    kernel. The checked limit is the absolute MOST_US.
    """
    gigabytes = _bandwidth()
    launch_us = graph_us(lambda: launch("nothing"))
    checks.value("floors", "memory, read and written", f"{gigabytes:.0f} GB/s")
    checks.value(
        "floors", "a kernel of one thread that does nothing, in a graph", f"{launch_us:.2f} us"
    )
    for slots, places, stamps in WINDOWS:
        window = Window(slots, places, stamps, seed=1)
        copy_us = graph_us(lambda window=window: window.tails.copy_(window.tails_before))
        took_us = graph_us(window.again) - copy_us
        moved = slots * (stamps * 8 + SUM_ROW * 8)
        _against_floor(
            checks,
            f"reduce_window ({slots}, {places}, {stamps})",
            took_us,
            moved,
            gigabytes,
            launch_us,
        )
        buckets = torch.zeros((slots, len(_QUANTILES)), dtype=torch.int32, device="cuda")
        parts = on_device(_QUANTILES)
        arguments = [window.rows[0], np.int32(slots), parts, np.int32(len(_QUANTILES)), buckets]
        took_us = graph_us(
            lambda slots=slots, arguments=arguments: launch_ours(
                "merged_quantiles", -(-slots // 4), 128, arguments
            )
        )
        moved = slots * SUM_ROW * 8
        _against_floor(checks, f"merged_quantiles ({slots})", took_us, moved, gigabytes, launch_us)
    for ranks, slots in RANKS:
        times = on_device(_times(ranks, slots))
        middle = torch.zeros((slots, 2), dtype=torch.float32, device="cuda")
        worst = torch.zeros(ranks, dtype=torch.int64, device="cuda")
        arguments = [times, np.int32(ranks), np.int32(slots), np.float32(MIN_SPREAD), middle, worst]
        kernels.raise_shared_memory_limit(torch.cuda.current_device(), ranks)
        took_us = graph_us(
            lambda ranks=ranks, slots=slots, arguments=arguments: launch_ours(
                "rank_scores", slots, 1024, arguments, 4 * ranks
            )
        )
        _against_floor(
            checks,
            f"rank_scores ({ranks}, {slots})",
            took_us,
            8 * ranks * slots,
            gigabytes,
            launch_us,
        )


def _against_floor(
    checks: Checks, what: str, took_us: float, moved: int, gigabytes: float, launch_us: float
) -> None:
    floor_us = max(moved / gigabytes / 1e3, launch_us)
    times = took_us / floor_us
    checks.bar(
        "floors",
        what,
        f"{took_us:.2f} us, {times:.1f} times the floor",
        f"<= {MOST_US} us",
        took_us <= MOST_US,
    )


def _bandwidth() -> float:
    """Return the bandwidth of a large copy in GB/s, counting reads and writes."""
    source = torch.empty(1 << 28, dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    took_us = graph_us(lambda: target.copy_(source), calls=4, rounds=10)
    return 2 * source.numel() * 8 / took_us / 1e3


def crossover(checks: Checks) -> None:
    """Compare the times to reduce a window on the host, including the copy of its durations, and on
    the device, including the copy of the results.
    """
    for slots, places, stamps in WINDOWS:
        window = Window(slots, places, stamps, seed=2)
        durations = window.inputs[1]
        pinned = torch.empty(durations.shape, dtype=durations.dtype, pin_memory=True)
        results = [
            torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True) for rows in window.rows
        ]

        def by_host(
            window: Window = window,
            pinned: torch.Tensor = pinned,
            durations: torch.Tensor = durations,
        ) -> None:
            pinned.copy_(durations)
            values = pinned.numpy().view(np.uint64)
            twins.reduce_window(window.start_ns, values, window.head, window.tail)

        def by_device(window: Window = window, results: list[torch.Tensor] = results) -> None:
            window.again()
            for result, rows in zip(results, window.rows, strict=True):
                result.copy_(rows, non_blocking=True)

        host_us, device_us = _median_us(by_host), _median_us(by_device)
        faster = "device" if device_us < host_us else "host"
        value = f"host {host_us:.0f} us, device {device_us:.0f} us: {faster}"
        checks.value("crossover", f"{slots} slots of {stamps} durations", value)
    for ranks, slots in RANKS:
        times_ns = _times(ranks, slots)
        times = on_device(times_ns)

        def scores_by_host(times: torch.Tensor = times) -> None:
            twins.rank_scores(times.cpu().numpy(), MIN_SPREAD)

        def scores_by_device(times: torch.Tensor = times) -> None:
            middle, worst = _scores(times)
            middle.cpu(), worst.cpu()

        host_us, device_us = _median_us(scores_by_host), _median_us(scores_by_device)
        checks.value(
            "crossover",
            f"scores of {ranks} ranks",
            f"host {host_us:.0f} us, device {device_us:.0f} us",
        )


def _median_us(function: Any, rounds: int = 30) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        function()
        torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return float(np.median(times))
