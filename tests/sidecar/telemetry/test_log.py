"""Tests of telemetry in the sidecar: sampling times, files, restarts, and the report."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.sidecar.telemetry.test_infiniband import port
from tests.support.in_memory import InMemoryExporter
from tests.support.ranks import HOST, Rank
from tests.support.saved import save_and_load
from tests.support.telemetry import read_samples
from torchlens_perf.analysis.statistics.hardware import GpuProperties, HardwareTotals
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.report.build import build_report
from torchlens_perf.run import ownership
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.hardware_samples import GPUS, LINKS, Sample, build_sample
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.telemetry import log
from torchlens_perf.sidecar.telemetry.infiniband import LinkTelemetry
from torchlens_perf.sidecar.telemetry.log import TelemetryLog
from torchlens_perf.verdicts import node_state
from torchlens_perf.view.terminal import print_report

SECOND = 1_000_000_000
STARTED_NS = 1_800_000_000 * SECOND
FIRST, SECOND_GPU = "GPU-aaaa", "GPU-bbbb"


class Gpus:
    """Fake GPUs that return the test's `values` and count the calls."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, GpuProperties] = {}
        self.losses: Counter[str] = Counter()
        self.slow_samples: Counter[str] = Counter()
        self.notes: list[str] = []
        self.asked: list[tuple[str, ...]] = []
        self.closed = False
        self._before: dict[str, Sample] = {}

    def sample_gpus(
        self,
        uuids: Collection[str],
        monotonic_ns: int,
        unix_ns: int,
        pids: Collection[int] = (),
    ) -> dict[str, Sample]:
        """Return samples of the GPUs that have values."""
        self.asked.append(tuple(uuids))
        samples = {}
        for uuid in uuids:
            if uuid in self.values:
                values, before = self.values[uuid], self._before.get(uuid)
                samples[uuid] = self._before[uuid] = build_sample(
                    GPUS, uuid, monotonic_ns, unix_ns, {"uuid": uuid, **values}, before
                )
                self.facts[uuid] = GpuProperties("NVIDIA H200", "00000000:1B:00.0")
        return samples

    def close(self) -> None:
        """Record the call."""
        self.closed = True


class Rig:
    """A telemetry log with a clock that only the test advances."""

    def __init__(self, run: RunDirectory, root: Path, saved: HardwareTotals | None = None) -> None:
        self.gpus = Gpus()
        self.now_ns = 1000 * SECOND
        self.log = TelemetryLog(
            run, HOST, saved or HardwareTotals(), self.gpus, LinkTelemetry(root), self.now
        )

    def now(self) -> Anchor:
        """Return the current time of both clocks."""
        return Anchor(self.now_ns, STARTED_NS + self.now_ns, 0)

    def seconds(self, count: int, *uuids: str) -> None:
        """Advance the clock, and call sample() four times a second."""
        for _ in range(4 * count):
            self.log.sample_due_sources(uuids, {})
            self.now_ns += SECOND // 4


@pytest.fixture
def rig(run: RunDirectory, tmp_path: Path) -> Rig:
    return Rig(run, tmp_path / "infiniband")


def test_gpus_are_sampled_each_second_and_ports_every_five(rig: Rig, tmp_path: Path) -> None:
    """The intervals do not depend on the calls of sample(). Without GPUs, NVML is not called."""
    port(tmp_path / "infiniband")
    rig.seconds(2)
    assert rig.gpus.asked == []
    rig.gpus.values = {FIRST: {"sm_clock_hz": 5}, SECOND_GPU: {"sm_clock_hz": 6}}
    rig.seconds(10, FIRST, SECOND_GPU)

    assert rig.gpus.asked == [(FIRST, SECOND_GPU)] * 10
    assert len(rig.log.recent_samples(FIRST, 0, 1 << 62)) == 10
    assert [
        each["sm_clock_hz"]
        for each in rig.log.recent_samples(SECOND_GPU, 1004 * SECOND, 1006 * SECOND)
    ] == [6] * 3
    assert rig.log.port_names == ["mlx5_0/1"]
    assert len(rig.log.recent_samples("mlx5_0/1", 0, 1 << 62)) == 3


def test_recent_samples_are_bounded_while_totals_stay_complete(rig: Rig) -> None:
    rig.gpus.values = {FIRST: {"energy_j": 0.0}}
    for second in range(1000):
        rig.gpus.values[FIRST]["energy_j"] = 500.0 * second
        rig.seconds(1, FIRST)
    kept = rig.log.recent_samples(FIRST, 0, 1 << 62)
    totals = rig.log.run_totals().gpus[FIRST]

    assert (len(kept), kept[0].monotonic_ns) == (900, 1100 * SECOND)
    assert (totals.samples, totals.grown["energy_j"]) == (1000, 500 * 999)


def test_samples_read_back_from_files_equal_the_written_ones(
    rig: Rig, run: RunDirectory, tmp_path: Path
) -> None:
    """Growth is saved too. Columns without any value exist and are null."""
    port(tmp_path / "infiniband")
    rig.gpus.values = {FIRST: {"power_w": 500.5, "xids": 0, "remapping_pending": False}}
    for part in range(3):
        rig.gpus.values[FIRST]["xids"] = part
        rig.seconds(20, FIRST)
        rig.log.write_if_due(1 << 24)
    rig.seconds(1, FIRST)
    rig.log.write_if_due(1 << 24, final=True)
    (gpu, samples), *others = read_samples(run, GPUS, HOST).items()
    (link, of_link), *_ = read_samples(run, LINKS, HOST).items()
    rows = pq.read_table(run.path / "gpus").to_pandas()

    assert (gpu, len(samples), others, link, len(of_link)) == (FIRST, 61, [], "mlx5_0/1", 13)
    assert samples == rig.log.recent_samples(FIRST, 0, 1 << 62)
    assert of_link == rig.log.recent_samples("mlx5_0/1", 0, 1 << 62)
    assert (set(rows["host"]), rows["time"].is_monotonic_increasing) == ({HOST}, True)
    assert (rows["time"][0].value, rows["monotonic_ns"][0]) == (
        STARTED_NS + 1000 * SECOND,
        1000 * SECOND,
    )
    assert (rows["sm_active"].isna().all(), rows["sm_active"].dtype, rows["xids"].max()) == (
        True,
        "float64",
        2,
    )


def test_telemetry_files_are_written_less_often_in_an_old_run(rig: Rig, run: RunDirectory) -> None:
    """The interval grows from ten seconds to two minutes."""
    rig.gpus.values = {FIRST: {"power_w": 1.0}}
    ends = []
    for second in range(2700):
        rig.seconds(1, FIRST)
        files = len(list((run.path / "gpus").glob("*"))) if second else 0
        rig.log.write_if_due(1 << 24)
        if len(list((run.path / "gpus").glob("*"))) > files:
            ends.append(second)

    assert ends[:3] == [9, 19, 29]
    assert ends[-1] - ends[-2] == 120


def test_oldest_telemetry_files_are_removed_beyond_the_disk_limit(
    rig: Rig, run: RunDirectory
) -> None:
    """The state contains the number of removed files."""
    rig.gpus.values = {FIRST: {"power_w": 1.0}}
    for _ in range(40):
        rig.seconds(12, FIRST)
        rig.log.write_if_due(1 << 20)
    sizes = [path.stat().st_size for path in (run.path / "gpus").iterdir()]

    assert sum(sizes) <= (1 << 20) / 16
    assert rig.log.run_totals().dropped_files > 0
    assert read_samples(run, GPUS, HOST)[FIRST][-1] == rig.log.recent_samples(FIRST, 0, 1 << 62)[-1]
    state = node_state.NodeState(HOST, telemetry=save_and_load(rig.log.run_totals()))
    (note,) = [
        each for each in build_report("run", [state])["quality"]["notes"] if "telemetry" in each
    ]
    assert note.endswith(
        "old telemetry files were removed to stay below disk_bytes. Totals include their samples"
    )


def test_samples_that_did_not_fit_on_the_disk_are_written_later(
    rig: Rig, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next file contains the unwritten samples. No partial file is left."""
    write_all = ownership.write_all

    def full(file: Any, content: Any) -> None:
        write_all(file, content[:4])
        raise OSError(28, "No space left on device")

    rig.gpus.values = {FIRST: {"power_w": 1.0}}
    rig.seconds(12, FIRST)
    monkeypatch.setattr(ownership, "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        rig.log.write_if_due(1 << 24)
    assert list((run.path / "gpus").iterdir()) == []
    monkeypatch.setattr(ownership, "write_all", write_all)
    rig.seconds(12, FIRST)
    rig.log.write_if_due(1 << 24)

    assert len(read_samples(run, GPUS, HOST)[FIRST]) == 24


def test_oldest_unwritten_samples_are_dropped_above_the_limit(
    rig: Rig, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report contains the number of dropped samples."""
    monkeypatch.setattr(log, "_MAX_UNWRITTEN", 10)
    rig.gpus.values = {FIRST: {"power_w": 1.0}}
    rig.seconds(14, FIRST)
    rig.log.write_if_due(1 << 24)
    state = node_state.NodeState(HOST, telemetry=save_and_load(rig.log.run_totals()))

    assert [each.monotonic_ns // SECOND for each in read_samples(run, GPUS, HOST)[FIRST]] == [
        *range(1004, 1014)
    ]
    assert (
        "4 samples of GPUs and network ports could not be written to the run directory. Totals"
        " include these samples" in (build_report("run", [state])["quality"]["notes"])
    )


def test_rings_are_removed_although_telemetry_cannot_be_written(
    run: RunDirectory, rig: Rig, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Telemetry is written after the records are saved and the rings are removed."""
    rig.gpus.values = {FIRST: {"power_w": 1.0}}
    rank = with_gpu(run, 0, FIRST, world_size=1)
    run_round(sidecar)
    rank.close()
    sidecar.read_rings()
    sidecar.count_records()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log.SampleWriter, "write", full)
    with pytest.raises(OSError, match="No space left"):
        sidecar.save_records()

    assert not rank.ring_path.exists()
    assert pq.read_table(run.steps).num_rows == 5
    sidecar.close()


def test_telemetry_totals_continue_after_a_restart_of_the_sidecar(
    rig: Rig, run: RunDirectory, tmp_path: Path
) -> None:
    """Counts of losses and file numbers continue too."""
    rig.gpus.values = {FIRST: {"pcie_replays": 0}}
    rig.gpus.losses[FIRST] = 1
    rig.seconds(12, FIRST)
    rig.log.write_if_due(1 << 24)
    later = Rig(run, tmp_path / "infiniband", save_and_load(rig.log.run_totals()))
    later.now_ns = 2000 * SECOND
    later.gpus.values = {FIRST: {"pcie_replays": 5}}
    later.gpus.losses[FIRST] = 2
    later.seconds(12, FIRST)
    later.log.write_if_due(1 << 24, final=True)
    totals = later.log.run_totals()

    assert (totals.gpus[FIRST].samples, totals.losses) == (24, {FIRST: 3})
    assert [path.name for path in sorted((run.path / "gpus").iterdir())] == [
        f"{HOST}-000001.parquet", f"{HOST}-000002.parquet",
    ]  # fmt: skip
    assert len(read_samples(run, GPUS, HOST)[FIRST]) == 24


def run_round(made: Sidecar) -> None:
    """Run one round of the sidecar without its waiting."""
    made.read_rings()
    made.count_records()
    made.sample_telemetry()


@pytest.fixture
def sidecar(run: RunDirectory, rig: Rig) -> Sidecar:
    """Return a sidecar that uses the rig's telemetry."""
    made = Sidecar(run, HOST, InMemoryExporter(), lambda run, settings: None)
    made.telemetry = rig.log
    return made


def with_gpu(
    run: RunDirectory, rank: int, *uuids: str, world_size: int = 3, **settings: Any
) -> Rank:
    """Return a rank that has published that it computes on the given GPUs."""
    made = Rank(run, rank, world_size, **settings)
    made.session.facts.gpus = [{"uuid": uuid, "name": "NVIDIA H200", "index": 0} for uuid in uuids]
    made.session.publish()
    made.session.publish()
    made.steps(5, forward=4)
    return made


def test_sidecar_samples_the_gpus_of_live_ranks(
    run: RunDirectory, rig: Rig, sidecar: Sidecar
) -> None:
    """A GPU of two processes is sampled once.

    After the end of its processes, a GPU is not sampled any more.
    """
    exporter = sidecar.exporter
    assert isinstance(exporter, InMemoryExporter)
    rig.gpus.values = {FIRST: {"sm_clock_hz": 5}, SECOND_GPU: {"sm_clock_hz": 6}}
    ranks = [with_gpu(run, 0, FIRST), with_gpu(run, 1, FIRST), with_gpu(run, 2, SECOND_GPU)]
    run_round(sidecar)
    for rank in ranks[:2]:
        rank.close()
    sidecar.read_rings()
    rig.now_ns += 2 * SECOND
    run_round(sidecar)
    ranks[2].close()
    sidecar.read_rings()
    rig.now_ns += 2 * SECOND
    run_round(sidecar)
    sidecar.save_records()
    sidecar.close()

    assert rig.gpus.asked == [(FIRST, SECOND_GPU), (SECOND_GPU,)]
    assert [[gpu.name for gpu in each.samples] for each in exporter.hardware] == [
        [FIRST, SECOND_GPU],
        [SECOND_GPU],
    ]
    assert exporter.hardware[0].names == dict.fromkeys((FIRST, SECOND_GPU), "NVIDIA H200")
    assert rig.gpus.closed
    assert set(read_samples(run, GPUS, HOST)) == {FIRST, SECOND_GPU}


def test_no_telemetry_is_sampled_if_switched_off(
    run: RunDirectory, rig: Rig, sidecar: Sidecar, tmp_path: Path
) -> None:
    port(tmp_path / "infiniband")
    rank = with_gpu(run, 0, FIRST, world_size=1, telemetry=False)
    run_round(sidecar)

    assert (rig.gpus.asked, rig.log.port_names) == ([], [])
    rank.close()
    sidecar.close()


def test_report_has_a_row_for_each_gpu(
    run: RunDirectory, rig: Rig, sidecar: Sidecar, tmp_path: Path
) -> None:
    """A row shows the ranks, the clock and the reason for a low clock.

    "-" marks missing values.
    """
    folder = port(tmp_path / "infiniband")
    rig.gpus.values = {
        FIRST: {
            "sm_clock_hz": 99 * 10**7, "sm_clock_max_hz": 198 * 10**7, "throttle_hw_thermal_ns": 0, "power_w": 300.4,
            "temperature_c": 88, "recovery_action": 1, "xids": 0, "last_xid": None, "ecc_uncorrected": 0,
            "tensor_active": 0.25,
        },
        SECOND_GPU: {"temperature_c": 60},
    }  # fmt: skip
    ranks = [with_gpu(run, 0, FIRST), with_gpu(run, 1, FIRST), with_gpu(run, 2, SECOND_GPU)]
    for second in range(1, 11):
        run_round(sidecar)
        rig.now_ns += SECOND
        rig.gpus.values[FIRST]["throttle_hw_thermal_ns"] = second * SECOND // 2
        rig.gpus.values[FIRST].update(xids=1, last_xid=63)
        (folder / "hw_counters/packet_seq_err").write_text(f"{8 + second}\n")
    sidecar.save_state()
    value = build_report(run.run_id, node_state.load_all(run))
    out = io.StringIO()
    print_report(value, out, "runs/x", whole=True)
    hot, cool = value["gpus"]
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]

    assert (hot["uuid"], hot["ranks"], cool["ranks"], hot["samples"]) == (FIRST, [0, 1], [2], 10)
    assert hot["signals"]["sm_clock_share"] == 0.5
    assert hot["throttled"] == {"thermal": 0.5, "hw_slowdown": 0.5}
    assert (hot["xids"], hot["last_xid"], hot["ecc_uncorrected"], hot["pcie_replays"]) == (
        1,
        63,
        0,
        None,
    )
    assert (cool["sm_clock_hz"], cool["throttled"], cool["xids"]) == (None, {}, None)
    assert "0-1 990 50% thermal 50%, hardware 50% 1 XID (last 63), needs a reset 300 88" in lines
    assert "2 - - - - - 60" in lines
    assert value["links"][0]["errors"] == {"sequence_errors": 5}
    assert f"{HOST} mlx5_0/1 sequence errors 5" in lines
    for rank in ranks:
        rank.close()
    sidecar.close()


def test_report_has_no_gpu_table_without_gpus(run: RunDirectory, sidecar: Sidecar) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(5, forward=4)
    run_round(sidecar)
    sidecar.save_state()
    value = build_report(run.run_id, node_state.load_all(run))
    out = io.StringIO()
    print_report(value, out, "runs/x", whole=True)

    assert (value["gpus"], value["links"]) == ([], [])
    assert "GPU" not in out.getvalue()
    assert not any("GPU" in note for note in value["quality"]["notes"])
    rank.close()
    sidecar.close()


def test_missing_telemetry_is_noted_once_in_the_report(
    run: RunDirectory, rig: Rig, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the telemetry does not affect steps and ranks."""
    monkeypatch.setenv(RAISE, "0")
    rank = with_gpu(run, 0, FIRST, world_size=1)
    rig.gpus.notes.append("GPU telemetry is not measured: why")
    run_round(sidecar)
    run_round(sidecar)

    def fails(*args: object) -> dict[str, Sample]:
        raise ValueError("not a number")

    monkeypatch.setattr(rig.gpus, "sample_gpus", fails)
    rig.now_ns += 2 * SECOND
    run_round(sidecar)
    sidecar.save_state()
    value = build_report(run.run_id, node_state.load_all(run))

    assert value["ranks"][0]["steps"] == 5
    place = "reading the hardware's telemetry"
    assert value["quality"]["notes"][:2] == [
        "GPU telemetry is not measured: why",
        f"{place} failed in the sidecar, and its results are missing: see nodes/{HOST}.log",
    ]
    assert swallowed.by_place.pop(place) == 1
    rank.close()
    sidecar.close()


def test_state_of_an_older_version_without_telemetry_can_be_read(
    run: RunDirectory, rig: Rig, sidecar: Sidecar
) -> None:
    rank = with_gpu(run, 0, FIRST, world_size=1)
    run_round(sidecar)
    sidecar.save_state()
    path = run.node_state_path(HOST)
    value = json.loads(path.read_text())
    del value["telemetry"]
    for process in value["processes"].values():
        del process["facts"]["gpus"]
    path.write_text(json.dumps(value))
    loaded = node_state.load(path)

    assert (loaded.telemetry, [process.facts.gpus for process in loaded.processes.values()]) == (
        HardwareTotals(),
        [[]],
    )
    rank.close()
    sidecar.close()
