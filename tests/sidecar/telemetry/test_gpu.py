"""Tests of GPU telemetry with the real pynvml and a scripted NVML library."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.device.fake_nvml import AMPERE, HOPPER, MS, UUIDS, WORKSTATION, FakeNvml
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER
from torchlens_perf.commands import doctor
from torchlens_perf.run.hardware_samples import COUNTERS, GPU_GAUGES, GPUS, Sample
from torchlens_perf.sidecar.telemetry.gpu import GpuTelemetry, query_gpu_support

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER)
SECOND = 1_000 * MS
RANK_PID = 7  # as in HOPPER
LOST, NO_DATA, DRIVER_NOT_LOADED, IN_USE = 15, 21, 9, 19


class Rig:
    """GPUs and their telemetry, with a clock that only tests advance."""

    def __init__(self, nvml: FakeNvml) -> None:
        self.nvml = nvml
        self.now_ns = 0
        self.telemetry = GpuTelemetry(lambda: self.now_ns)

    def sample(self, *uuids: str, after_s: float = 1) -> dict[str, Sample]:
        """Advance the clock, and return samples of the given GPUs or of all GPUs."""
        self.now_ns += round(after_s * SECOND)
        wanted = uuids or UUIDS[: len(self.nvml.gpus)]
        return self.telemetry.sample_gpus(wanted, self.now_ns, self.now_ns + 7, {RANK_PID})

    def one(self, after_s: float = 1) -> Sample:
        """Return a sample of the first GPU."""
        return self.sample(after_s=after_s)[UUIDS[0]]


@pytest.fixture
def rig(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Return a rig with one Hopper GPU."""
    # A library is loaded once per path, so a copy has a state of its own.
    own = tmp_path / "libnvidia-ml.so.1"
    shutil.copy(nvml_library, own)
    nvml = FakeNvml(tmp_path / "gpus.txt")
    monkeypatch.setenv("FAKE_NVML", str(nvml.script))
    nvml.load(own)
    nvml.gpus = [dict(HOPPER)]
    nvml.write()
    made = Rig(nvml)
    yield made
    made.telemetry.close()
    assert nvml.allocated == 0
    nvml.unload()


def test_hopper_gpu_reports_all_quantities_in_their_units(rig: Rig) -> None:
    """The values of GPM are known from the second sample on."""
    first = rig.one()
    second = rig.one()

    assert [name for name in (*COUNTERS[GPUS], *GPU_GAUGES) if second[name] is None] == []
    assert (first["sm_active"], first["interval_ns"], first.grown) == (None, None, {})
    assert (second.name, second.monotonic_ns, second.unix_ns) == (
        UUIDS[0],
        2 * SECOND,
        2 * SECOND + 7,
    )
    expected = {
        "uuid": UUIDS[0], "sm_clock_hz": 17e8, "sm_clock_max_hz": 198e7, "memory_clock_hz": 3201e6, "power_w": 498.123,
        "power_limit_w": 700, "energy_j": 5e6, "temperature_c": 61, "memory_temperature_c": 74, "clock_reasons": 4,
        "memory_used_bytes": 100 << 30, "memory_total_bytes": 141 << 30, "nvlink_transmitted_bytes": 10 << 10,
        "nvlink_received_bytes": 20 << 10, "pcie_transmitted_bytes": 5 << 32, "pcie_received_bytes": 6 << 32,
        "ecc_corrected": 1, "ecc_uncorrected": 0, "remapped_rows": 2, "remapping_pending": False, "busy": 0.98,
        "sm_active": 0.8, "sm_occupancy": 0.4, "tensor_active": 0.55, "dram_active": 0.3, "xids": 0, "last_xid": None,
    }  # fmt: skip
    assert {name: second[name] for name in expected} == expected
    assert rig.telemetry.facts[UUIDS[0]].name == "NVIDIA H200"
    assert rig.telemetry.facts[UUIDS[0]].pci_bus_id == "00000000:00:00.0"
    assert rig.telemetry.notes == []


def test_counters_are_reported_as_growth_since_the_last_sample(rig: Rig) -> None:
    """If a counter has a lower value than before, it was reset."""
    rig.one()
    rig.nvml.gpus[0].update(
        {"field 74": 600 * MS, "field 83": 5_000_500_000, "field 161.3": 4, "field 161.7": 1}
    )
    rig.nvml.write()
    sample = rig.one(after_s=11)  # Errors are read every ten seconds.
    rig.nvml.gpus[0].update({"field 74": 100 * MS})
    rig.nvml.write()
    fell = rig.one()

    assert (sample["interval_ns"], sample["throttle_power_ns"], sample["nvlink_replays"]) == (
        11 * SECOND,
        600 * MS,
        5,
    )
    assert {name: more for name, more in sample.grown.items() if more} == {
        "throttle_power_ns": 600 * MS, "energy_j": 500, "nvlink_replays": 5,
    }  # fmt: skip
    assert fell.grown["throttle_power_ns"] == 100 * MS


@pytest.mark.parametrize(
    ("processes", "busy", "pid"),
    [
        ({}, 0.0, None),  # The rank alone uses the GPU.
        ({4711: 30, 4712: 45}, 0.75, 4712),
        ({4711: 0}, 0.0, None),  # A process that only holds memory.
        ({4711: 80, 4712: 60}, 1.0, 4711),
    ],
)
def test_use_by_processes_outside_the_job_is_reported(
    rig: Rig, processes: dict[int, int], busy: float, pid: int | None
) -> None:
    rig.nvml.gpus[0].update({f"process {each}": use for each, use in processes.items()})
    rig.nvml.write()
    samples = [rig.one() for _ in range(3)]

    assert [each["others_busy"] for each in samples] == [pytest.approx(busy)] * 3
    assert {each["other_pid"] for each in samples} == {pid}


@pytest.mark.parametrize("listed", [{}, {4711: 80}])
def test_use_by_other_processes_is_not_measured_unless_the_rank_is_listed(
    rig: Rig, listed: dict[int, int]
) -> None:
    """In a container, the driver lists all processes by ids of the host."""
    del rig.nvml.gpus[0][f"process {RANK_PID}"]
    rig.nvml.gpus[0].update({f"process {each}": use for each, use in listed.items()})
    rig.nvml.write()

    assert [(each["others_busy"], each["other_pid"]) for each in (rig.one(), rig.one())] == [
        (None, None)
    ] * 2


def test_unsupported_quantities_are_none_and_read_only_once(rig: Rig) -> None:
    """A missing value is never 0."""
    rig.nvml.gpus = [dict(HOPPER), dict(AMPERE), dict(WORKSTATION)]
    rig.nvml.write()
    for _ in range(3):
        hopper, ampere, workstation = rig.sample().values()

    assert hopper["throttle_hw_thermal_ns"] == 0
    assert (
        ampere["throttle_hw_thermal_ns"],
        ampere["sm_active"],
        ampere["throttle_thermal_ns"],
    ) == (
        None,
        None,
        0,
    )
    assert (
        ampere["nvlink_replays"],
        ampere["nvlink_recoveries"],
        ampere["nvlink_errors"],
        ampere["busy"],
    ) == (
        3,
        1,
        2,
        0.97,
    )
    assert (workstation["power_w"], workstation["temperature_c"], workstation["busy"]) == (
        310.5,
        70,
        0.5,
    )
    known = {name for name in (*COUNTERS[GPUS], *GPU_GAUGES) if workstation[name] is not None}
    assert known == {
        "sm_clock_hz", "sm_clock_max_hz", "memory_clock_hz", "power_w", "temperature_c", "memory_used_bytes",
        "memory_total_bytes", "busy", "xids",
    }  # fmt: skip

    before = {
        name: rig.nvml.calls(name)
        for name in ("nvmlGpmQueryDeviceSupport", "nvmlDeviceGetFieldValues")
    }
    rig.sample(UUIDS[2])
    assert {name: rig.nvml.calls(name) for name in before} == before
    assert rig.telemetry.notes == []


@pytest.mark.parametrize(
    ("driver", "first_id"),
    [
        ("610.43.02", 269), ("580.82.07", 269), ("580.76.05", 251), ("580.65.06", 251), ("575.51.02", 251),
        ("570.211.01", None), ("535.54.03", None), ("r.unknown", None),
    ],
)  # fmt: skip
def test_field_ids_of_throttle_times_depend_on_the_driver(
    rig: Rig, driver: str, first_id: int | None
) -> None:
    """In other drivers the same ids are settings of power smoothing, which must not be read."""
    power_smoothing = {f"field {number}": 7 for number in (*range(251, 255), *range(256, 275))}
    theirs = (
        {}
        if first_id is None
        else {f"field {first_id + place}": 1000 + place for place in range(3)}
    )
    rig.nvml.gpus = [HOPPER | power_smoothing | theirs]
    rig.nvml.write(f"driver {driver}")
    sample = rig.one()
    expected = (None, None, None) if first_id is None else (1000, 1001, 1002)
    assert (
        sample["throttle_sw_thermal_ns"],
        sample["throttle_hw_thermal_ns"],
        sample["throttle_hw_power_brake_ns"],
    ) == expected
    assert (sample["throttle_power_ns"], sample["pcie_replays"]) == (
        0,
        0,
    ), "what has not moved is asked for with any driver"


def test_throttle_times_are_missing_without_a_driver_version(rig: Rig) -> None:
    rig.nvml.write("fail nvmlSystemGetDriverVersion 999")
    sample = rig.one()
    assert (sample["throttle_hw_thermal_ns"], sample["throttle_power_ns"]) == (None, 0)


def test_all_fields_of_a_sample_are_read_in_one_call(rig: Rig) -> None:
    """Memory errors are read only every ten seconds."""
    rig.one()
    before = rig.nvml.calls("nvmlDeviceGetFieldValues")
    for _ in range(9):
        rig.one()
    assert rig.nvml.calls("nvmlDeviceGetFieldValues") - before == 9
    rig.one()
    assert rig.nvml.calls("nvmlDeviceGetFieldValues") - before == 12


def test_lost_gpu_is_retried_with_back_off(rig: Rig) -> None:
    """The XID error and the loss of the GPU are noted once. Other GPUs are still sampled."""
    rig.nvml.gpus = [dict(HOPPER), dict(HOPPER)]
    rig.nvml.write()
    rig.sample()
    rig.nvml.gpus[0]["field 94"] = 2
    failures = [
        f"fail nvmlDeviceGetFieldValues {LOST} 0 0",
        f"fail nvmlDeviceGetHandleByUUID {LOST}",
    ]
    rig.nvml.write(*failures, "gpu 0 xid 79")
    lost = [set(rig.sample()) for _ in range(16)]
    calls = rig.nvml.calls("nvmlDeviceGetHandleByUUID")
    rig.nvml.write()
    for _ in range(40):
        again = rig.sample()

    assert lost == [{UUIDS[1]}] * 16
    assert calls <= 2 + 5  # Retries follow after 1, 2, 4, 8, ... s.
    assert set(again) == {UUIDS[0], UUIDS[1]}
    assert (again[UUIDS[0]]["xids"], again[UUIDS[0]]["last_xid"], again[UUIDS[1]]["xids"]) == (
        1,
        79,
        0,
    )
    assert again[UUIDS[0]]["pcie_replays"] == 2
    assert rig.telemetry.losses == {UUIDS[0]: 1}
    (note,) = rig.telemetry.notes
    assert (
        note == f"{UUIDS[0]}: no telemetry while the driver reports: GPU is lost; "
        "see the kernel's log (dmesg), its last XID is 79"
    )


def test_lost_gpu_is_detected_from_the_result_of_a_field(rig: Rig) -> None:
    """The call itself succeeds. Other failures of a field affect only the present sample."""
    rig.nvml.gpus[0]["code 82"] = NO_DATA
    rig.nvml.write()
    without = rig.one()
    rig.nvml.gpus[0]["code 82"] = LOST
    rig.nvml.write()
    lost = rig.sample()
    del rig.nvml.gpus[0]["code 82"]
    rig.nvml.write()
    again = rig.one(after_s=2)

    assert (without["memory_temperature_c"], without["power_w"], again["memory_temperature_c"]) == (
        None,
        498.123,
        74,
    )
    assert lost == {}
    assert rig.telemetry.losses == {UUIDS[0]: 1}


def test_counter_growth_during_a_gap_is_reported_once(rig: Rig) -> None:
    """The first sample after the gap contains the whole growth of a counter."""
    rig.one()
    rig.nvml.write(f"fail nvmlDeviceGetFieldValues {LOST}")
    assert rig.sample() == {}
    rig.nvml.gpus[0]["field 94"] = 3
    rig.nvml.write()
    back, later = rig.one(after_s=10), rig.one()

    assert (back["interval_ns"], back.grown["pcie_replays"]) == (11 * SECOND, 3)
    assert later.grown["pcie_replays"] == 0


@pytest.mark.parametrize("events", ["with XIDs", "without"])
@pytest.mark.parametrize("how", ["reloaded", "gone for a while"])
def test_library_is_initialised_again_after_a_driver_reload(
    rig: Rig, how: str, events: str
) -> None:
    """The reload invalidates all handles and resets the counters to 0."""
    rights = ["fail nvmlEventSetCreate 4"] * (events == "without")
    rig.nvml.gpus = [dict(HOPPER), dict(HOPPER)]
    rig.nvml.write(*rights)
    rig.sample()
    for gpu in rig.nvml.gpus:
        gpu["field 83"] = 1_000_000
    if how == "reloaded":
        rig.nvml.write(*rights, "restart 2")
    else:
        rig.nvml.write(*rights, "restart 2", f"fail nvmlInitWithFlags {DRIVER_NOT_LOADED}")
    during = [rig.sample() for _ in range(8)]
    rig.nvml.write(*rights, "restart 2")
    for _ in range(20):
        after = rig.sample()

    assert during[0] == {}
    assert set(after) == {UUIDS[0], UUIDS[1]}
    if how == "reloaded":
        assert during[1][UUIDS[0]].grown["energy_j"] == 1000
    else:
        assert during == [{}] * 8
        # Retries follow after 1, 2 and 4 s. A last one succeeds.
        assert rig.nvml.calls("nvmlInitWithFlags") <= 1 + 3 + 1
    assert rig.telemetry.losses == {"": 1}
    assert (
        "GPU telemetry was interrupted because the driver was reloaded: Uninitialized"
        in rig.telemetry.notes
    )


def test_xids_are_counted_per_gpu_and_at_most_64_per_sample(rig: Rig) -> None:
    """XIDs of GPUs that are not sampled do not count."""
    rig.nvml.gpus = [dict(HOPPER) for _ in range(3)]
    rig.nvml.write()
    rig.sample(UUIDS[0], UUIDS[1])
    rig.nvml.write(*["gpu 0 xid 31"] * 100, "gpu 1 xid 94", "gpu 2 xid 48")
    samples = [rig.sample(UUIDS[0], UUIDS[1]) for _ in range(2)]

    assert [each[UUIDS[0]]["xids"] for each in samples] == [64, 100]
    assert (samples[1][UUIDS[1]]["xids"], samples[1][UUIDS[1]]["last_xid"]) == (1, 94)
    assert samples[1][UUIDS[0]].grown["xids"] == 36


def test_xids_of_other_gpus_are_counted_while_one_gpu_is_lost(rig: Rig) -> None:
    """NVML cannot wait for events of a set that contains a lost GPU."""
    rig.nvml.gpus = [dict(HOPPER), dict(HOPPER)]
    rig.nvml.write()
    rig.sample()
    rig.nvml.gpus[0]["lost"] = 1
    rig.nvml.write()
    rig.sample()
    rig.nvml.write("gpu 1 xid 94")
    other = rig.sample()
    del rig.nvml.gpus[0]["lost"]
    rig.nvml.write()
    rig.sample(after_s=10)
    rig.nvml.write("gpu 0 xid 31")
    both = rig.sample()

    assert (set(other), other[UUIDS[1]]["xids"]) == ({UUIDS[1]}, 1)
    assert [(both[uuid]["xids"], both[uuid]["last_xid"]) for uuid in UUIDS[:2]] == [
        (1, 31),
        (1, 94),
    ]


def test_xids_are_missing_without_permission_for_events(rig: Rig) -> None:
    rig.nvml.write("fail nvmlDeviceRegisterEvents 4")
    assert (rig.one()["xids"], rig.one()["sm_clock_hz"]) == (None, 17e8)


def test_gpu_activity_is_missing_while_another_tool_uses_gpm(rig: Rig) -> None:
    """The conflict is noted once, and later attempts leak no memory."""
    rig.one()
    rig.nvml.write(f"fail nvmlGpmSampleGet {IN_USE}")
    refused = [rig.one() for _ in range(3)]
    assert rig.nvml.allocated == 1  # Only the event set is still allocated.
    rig.nvml.write()
    soon = rig.one()
    later = [rig.one(after_s=60), rig.one()]

    assert [each["sm_active"] for each in refused] == [None] * 3
    assert refused[0]["busy"] == 0.97  # NVML's own value does not need GPM.
    assert soon["sm_active"] is None
    assert [each["sm_active"] for each in later] == [None, 0.8]
    (note,) = rig.telemetry.notes
    assert note.startswith(
        f"{UUIDS[0]}: activity of SMs, tensor cores and memory is not measured: GPM reports "
    )


@pytest.mark.parametrize(
    ("code", "notes"), [(3, 0), (13, 0), (4, 1)], ids=["not supported", "old driver", "no right"]
)
def test_driver_without_gpm_is_queried_only_once(rig: Rig, code: int, notes: int) -> None:
    """A missing permission is noted, but a driver without GPM is not."""
    rig.nvml.write(f"fail nvmlGpmQueryDeviceSupport {code}")
    samples = [rig.one(after_s=100) for _ in range(3)]

    assert [each["sm_active"] for each in samples] == [None] * 3
    assert rig.nvml.calls("nvmlGpmQueryDeviceSupport") == 1
    assert len(rig.telemetry.notes) == notes


def test_gpu_activity_covers_the_interval_since_the_last_sample(rig: Rig) -> None:
    rig.one()
    rig.one()
    rig.nvml.gpus[0]["gpm 2"] = 20
    rig.nvml.write()
    assert [rig.one()["sm_active"] for _ in range(2)] == [0.5, 0.2]


def test_gpu_that_is_requested_twice_is_sampled_once(rig: Rig) -> None:
    samples = rig.telemetry.sample_gpus(dict.fromkeys([UUIDS[0], UUIDS[0]]), SECOND, 0)
    assert list(samples) == [UUIDS[0]]
    assert rig.nvml.calls("nvmlDeviceGetCurrentClocksEventReasons") == 1


def test_gpu_that_is_no_longer_requested_is_released(rig: Rig) -> None:
    rig.nvml.gpus = [dict(HOPPER), dict(HOPPER)]
    rig.nvml.write()
    rig.sample()
    assert rig.nvml.allocated == 5
    rig.sample(UUIDS[1])
    assert rig.nvml.allocated == 3


def test_mig_instance_is_found_by_its_uuid(rig: Rig) -> None:
    """torch reports a MIG instance's UUID with the prefix of a whole GPU."""
    mig = UUIDS[0].replace("GPU-", "MIG-")
    rig.nvml.gpus = [{"uuid": mig, "memory_used": 5 << 30, "memory_total": 18 << 30}]
    rig.nvml.write("fail nvmlDeviceRegisterEvents 3")
    sample = rig.one()

    assert (sample["uuid"], sample["memory_used_bytes"], sample["power_w"], sample["xids"]) == (
        UUIDS[0],
        5 << 30,
        None,
        None,
    )


def test_gpu_that_nvml_does_not_list_is_noted(rig: Rig) -> None:
    assert rig.sample(UUIDS[3]) == {}
    assert rig.telemetry.notes == [
        f"{UUIDS[3]}: no telemetry because NVML cannot open it: Not Found"
    ]


def test_gpu_with_slow_calls_is_sampled_less_often(rig: Rig) -> None:
    """After a slow sample, the GPU is not sampled for twenty times the sample's duration.

    The third slow sample is noted. If only the opening of the GPU is slow, the interval does not
    change.
    """
    rig.nvml.write("sleep nvmlDeviceGetName 60")
    for _ in range(5):  # Any call may take long on a busy machine.
        rig.telemetry = GpuTelemetry()  # Without arguments, GpuTelemetry uses the real clock.
        rig.sample()
        found = set(rig.sample()), rig.telemetry.slow_samples[UUIDS[0]]
        if not found[1]:
            break
    assert found == ({UUIDS[0]}, 0)
    # NVML has two clocks, so the function is called twice.
    rig.nvml.write("sleep nvmlDeviceGetClockInfo 30")
    answers = [
        (bool(rig.sample(after_s=60)), rig.sample(), len(rig.telemetry.notes)) for _ in range(3)
    ]

    assert answers == [(True, {}, 0), (True, {}, 0), (True, {}, 1)]
    assert rig.telemetry.slow_samples == {UUIDS[0]: 3}
    assert rig.telemetry.notes[0].endswith(" s to answer; it is sampled less often")


_BESIDE_ANOTHER = """
import os, subprocess, sys, time
from torchlens_perf.run.processes import clock_without_cpu_wait_ns
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
begun_ns, clock_ns = time.monotonic_ns(), clock_without_cpu_wait_ns()
while time.monotonic_ns() < begun_ns + 2_000_000_000:
    pass
print((clock_without_cpu_wait_ns() - clock_ns) / (time.monotonic_ns() - begun_ns))
other.kill()
"""


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="this kernel has no schedstat"
)
def test_time_waiting_for_a_cpu_does_not_count_as_a_slow_call() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BESIDE_ANOTHER], capture_output=True, text=True, check=True
    )
    assert 0.01 < float(done.stdout) < 0.9


def test_survey_counts_gpus_that_support_gpm(rig: Rig) -> None:
    """Without NVML, the survey returns the error."""
    rig.nvml.gpus = [dict(HOPPER), dict(AMPERE)]
    rig.nvml.write()
    assert query_gpu_support() == ("580.126.09", 2, 1)
    rig.nvml.write(f"fail nvmlInitWithFlags {DRIVER_NOT_LOADED}")
    assert query_gpu_support() == "Driver Not Loaded"


def test_doctor_prints_the_survey_of_gpus(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML, doctor prints the reason and a remedy."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    line, _ = map(str, doctor.check_telemetry())
    rig.nvml.write("fail nvmlInitWithFlags 12")
    without, _ = map(str, doctor.check_telemetry())

    assert (
        line
        == "ok      GPU telemetry: NVML, driver 580.126.09; activity of SMs and memory: GPM on 1 of"
        " 1 GPUs"
    )
    assert without.startswith(
        "limited GPU telemetry: none: NVML reports NVML Shared Library Not Found; install the"
        " driver's"
    )


def test_nvml_is_not_loaded_on_a_node_without_a_gpu(rig: Rig) -> None:
    assert rig.telemetry.sample_gpus([], SECOND, 0) == {}
    assert rig.nvml.calls("nvmlInitWithFlags") == 0


def test_missing_nvml_library_is_noted_with_a_remedy(tmp_path: Path) -> None:
    """Some containers have GPUs but no NVML."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        pytest.skip("this machine has NVML")
    code = (
        "from torchlens_perf.sidecar.telemetry.gpu import GpuTelemetry\nmade = GpuTelemetry();"
        f" print(made.sample_gpus(['{UUIDS[0]}'], 1, 1), made.sample_gpus(['{UUIDS[0]}'], 2,"
        " 2))\nprint(*made.notes, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines() == [
        "{} {}",
        (
            "GPU telemetry is not measured: NVML Shared Library Not Found; in a container, set"
            " NVIDIA_DRIVER_CAPABILITIES to compute,utility"
        ),
    ]


def test_sample_costs_less_than_a_few_hundred_pynvml_calls(rig: Rig) -> None:
    import pynvml

    rig.one()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(UUIDS[0])
    gc.collect()

    def cost(call: object, times: int = 100) -> float:
        started_ns = time.process_time_ns()
        for _ in range(times):
            call()  # type: ignore[operator]
        return (time.process_time_ns() - started_ns) / times

    getter = min(cost(lambda: pynvml.nvmlDeviceGetTemperature(handle, 0)) for _ in range(5))
    sample = min(cost(rig.one) for _ in range(5))
    assert sample < 250 * getter
