"""Device sections merged over ranks: real processes with gloo and a fake device each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import torchlens_perf as perf
from tests.support.device.fake_device import FakeDevice, FakeTorchDevice
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER
from tests.support.long import long
from tests.support.processes import ROOT, run_warm, torchrun
from tests.support.recording import recorded
from torchlens_perf.cuda.section_stamper import MERGE_STEPS
from torchlens_perf.errors import RAISE, ConfigError
from torchlens_perf.recorder import devices as device
from torchlens_perf.run.device.step_parts import ROW_NAMES
from torchlens_perf.run.sketch import Sketch

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER),
    pytest.mark.distributed,
]
RANK = str(ROOT / "tests" / "support" / "device" / "merging_rank.py")
RANKS, WINDOWS, SLOW = 4, 3, 2
OVER_NS = 4000  # The fake device needs this long for two launches and a stamp.


def ranks_of(driver: Path, kernels: Path, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Run four ranks and return their results in order."""
    command = torchrun(RANK, str(driver), str(kernels), str(folder), *options, ranks=RANKS)
    broken = {RAISE: "0"} if "--broken-steps" in options else {}
    done = run_warm(command, folder, PYTHONPATH=str(ROOT), **broken)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def merged(
    driver_library: Path, shim_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Return the results of four ranks that merge their sections."""
    return ranks_of(driver_library, shim_library, tmp_path_factory.mktemp("merged"))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="as it is"),
        pytest.param(("--evaluates",), id="rank 0 evaluates first", marks=pytest.mark.long),
    ],
)
def test_rank_0_has_section_statistics_of_all_ranks_and_the_slow_one(
    merged: list[dict[str, Any]],
    driver_library: Path,
    shim_library: Path,
    tmp_path: Path,
    options: tuple[str, ...],
) -> None:
    """The rank that is slow in one section is reported.

    The window merged in the last step is included.
    """
    ranks = ranks_of(driver_library, shim_library, tmp_path, *options) if options else merged
    first = ranks[0]
    assert first["windows"] == {"attention": WINDOWS, "mlp": WINDOWS}
    assert all(rank["last"] == {} for rank in ranks[1:])
    assert all(rank["waited"] == 0 for rank in ranks)
    for name in ("attention", "mlp"):
        section = first["last"][name]
        window = [rank["planted"][WINDOWS - 1][name] for rank in ranks]
        every = np.array([each for times in window for each in times], np.int64) + OVER_NS
        assert section["count"] == len(every) == RANKS * MERGE_STEPS
        assert section["mean_ns"] == pytest.approx(every.mean(), abs=1)
        sketch = Sketch()
        sketch.add(every)
        assert section["p50_ns"] == pytest.approx(sketch.quantile_ns(0.5), rel=0.03)
        assert section["p99_ns"] == pytest.approx(sketch.quantile_ns(0.99), rel=0.03)
        medians = sorted(sorted(times)[(MERGE_STEPS - 1) // 2] + OVER_NS for times in window)
        assert section["rank_median_ns"] == pytest.approx(medians[(RANKS - 1) // 2], abs=1)
    assert first["last"]["mlp"]["slowest"] == SLOW
    assert first["last"]["mlp"]["score"] > 20
    assert first["last"]["attention"]["slowest"] != SLOW
    assert [rank["own"]["mlp"] for rank in ranks] == [WINDOWS * MERGE_STEPS] * RANKS, (
        "each rank keeps its own"
    )


def test_merged_parts_equal_the_planted_device_times(merged: list[dict[str, Any]]) -> None:
    """Medians of each part are compared in each window.

    The slow rank's excess is in its work and its forward pass only.
    """
    ranks, windows = merged, [dict[str, list[dict[str, Any]]](), {}, {}]
    by_step = sorted({row["step"] for row in ranks[0]["rows"]})
    assert len(by_step) == WINDOWS
    for row in ranks[0]["rows"]:
        windows[by_step.index(row["step"])].setdefault(row["name"], []).append(row)
    for number, window in enumerate(windows):
        assert set(window) == set(ROW_NAMES)
        medians = [sorted(rank["forward"][number])[(MERGE_STEPS - 1) // 2] for rank in ranks]
        usual = sorted(medians)[(RANKS - 1) // 2]
        forward, work = window["forward work"], window["step work"]
        for rows, over_ns in ((forward, 0), (work, 3_000_000), (window["whole step"], 5_000_000)):
            assert rows[0]["slowest"] == SLOW
            assert rows[0]["times"] == RANKS * MERGE_STEPS
            assert rows[0]["median_ns"] == pytest.approx(usual + over_ns, abs=10)
            assert rows[0]["excess_ns"] == pytest.approx(medians[SLOW] - usual, abs=2000)
        assert {row["outstanding"] for row in work} == {1}
        for name, ns in (
            ("backward work", 2_000_000),
            ("stalls", 2_000_000),
            ("gap", 1_000_000),
            ("optimizer work", 0),
        ):
            (row,) = window[name]
            assert (row["median_ns"], row["mad_ns"], row["slowest"], row["outstanding"]) == (
                ns,
                0,
                -1,
                0,
            ), name
    assert all(rank["rows"] == [] for rank in ranks[1:])


def test_window_due_during_a_graph_capture_is_merged_afterwards(
    driver_library: Path, shim_library: Path, tmp_path: Path
) -> None:
    """The last window is merged when the watch ends, and all ranks merge equally often.

    If all steps of one rank fail, only the times of the other ranks are merged.
    """
    ranks = ranks_of(driver_library, shim_library, tmp_path, "--captures", "--broken-steps")
    assert ranks[0]["windows"] == {"attention": WINDOWS, "mlp": WINDOWS}
    assert ranks[0]["last"]["mlp"]["slowest"] == SLOW
    due = WINDOWS * MERGE_STEPS
    assert [len(rank["notes"]) for rank in ranks] == [0, 1, 0, 0]
    assert f"device steps: {due} of {due} were not merged over ranks" in ranks[1]["notes"][0]
    assert {row["times"] for row in ranks[0]["rows"]} == {(RANKS - 1) * MERGE_STEPS}
    assert {row["slowest"] for row in ranks[0]["rows"] if row["name"] == "forward work"} == {SLOW}
    assert [rank["own"]["mlp"] for rank in ranks] == [WINDOWS * MERGE_STEPS] * RANKS


@pytest.mark.long
def test_sections_created_in_different_orders_are_not_merged(
    driver_library: Path, shim_library: Path, tmp_path: Path
) -> None:
    ranks = ranks_of(driver_library, shim_library, tmp_path, "--other-order")
    assert ranks[0]["windows"] == {"attention": 0, "mlp": 0}
    assert ranks[0]["last"] == {}
    assert any(
        "sections that ranks entered in different orders are not merged" in note
        for note in ranks[0]["notes"]
    )


@pytest.mark.parametrize("how", long("--unable", "--off"))
def test_sections_are_not_merged_unless_all_ranks_record(
    how: str, driver_library: Path, shim_library: Path, tmp_path: Path
) -> None:
    """No rank waits in a collective. Ranks that record keep their own times and note the reason."""
    ranks = ranks_of(driver_library, shim_library, tmp_path, how)
    others = [rank for rank in ranks if rank["rank"] != 1]
    if how == "--unable":
        assert any(
            "aggregate='device' is off: CuPy is missing" in note for note in ranks[1]["notes"]
        )
    assert all(
        "aggregate='device' is off: another rank cannot merge" in rank["notes"] for rank in others
    )
    assert all(rank["windows"] == {"attention": 0, "mlp": 0} for rank in ranks)
    assert all(rank["own"]["mlp"] == WINDOWS * MERGE_STEPS for rank in others)


def test_successive_watches_reuse_memory_and_events_for_merging(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream and the page-locked memory are reused too.

    Nothing is freed, because a call that frees memory may wait for the device.
    """
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Done())
    torch_device = FakeTorchDevice(device)
    ring = torch_device.get_or_create_ring()
    made = ("cuStreamCreate", "cuEventCreate", "cuMemAllocHost_v2")
    counts, hosts = [], []
    for watch in range(5):
        merge = torch_device.create_merger(ring, None)
        if watch == 2:  # This window's result is copied after the watch's end.
            device.spin(60_000_000_000, torch_device.aside_stream)
        merge.enqueue_merge(window=ring.enqueue_reduction(0))
        if watch != 2:
            device.advance(100_000_000_000)
            assert merge.collect_rows() == []
            ring.collect_result()
        calls = [
            device.calls(name)
            for name in (*made, "cuEventQuery", "cuCtxSynchronize", "cuMemFreeHost")
        ]
        merge.release_host_memory()
        assert calls == [
            device.calls(name)
            for name in (*made, "cuEventQuery", "cuCtxSynchronize", "cuMemFreeHost")
        ]
        counts.append([device.calls(name) for name in made])
        hosts.append(merge._host)
    assert counts[0] == counts[1] == counts[2]
    assert hosts[0] == hosts[1] == hosts[2] != hosts[3], (
        "what arrives late would arrive in the next watch's memory"
    )
    assert counts[3] == counts[4]
    assert device.calls("cuMemFreeHost") == 0


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        pass


def test_watch_with_aggregate_raises_without_a_gpu(tmp_path: Path) -> None:
    """The next watch works."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch was built for a device")
    with pytest.raises(ConfigError, match="aggregate='device': needs an NVIDIA GPU"):
        perf.watch(aggregate="device", sidecar=False, dir=str(tmp_path)).__enter__()
    with recorded(tmp_path) as recording:
        recording.watch.step()
    assert len(recording.steps) == 1


def test_aggregate_without_a_process_group_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised before anything is created."""
    import torch

    monkeypatch.setattr(device, "has_cuda_devices", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match="init_process_group"):
        perf.watch(aggregate="device", dir=str(tmp_path / "runs")).__enter__()
    assert not (tmp_path / "runs").exists()
