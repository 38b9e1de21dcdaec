"""Telemetry in a page: samples as levels, rates and shares over the run's time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import identity_of, make_run
from tests.support.telemetry import gpu_sample, port_sample
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.page.gather.hardware_series import (
    MAX_POINTS,
    read_hardware_series,
    trim_series,
)
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.hardware_samples import PROCESSES, Sample
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.store.samples import SampleWriter
from torchlens_perf.verdicts.node_state import ProcessState

SECOND = 10**9
BEGIN_NS = 1_790_000_000 * SECOND
NODE = "host-a"


def processes(run: RunDirectory) -> dict[int, ProcessState]:
    """Return two ranks, each with a GPU."""
    made = {}
    for rank in (0, 1):
        facts = RankFacts(gpus=[{"uuid": f"GPU-{rank}", "name": "H100", "index": 0}])
        made[rank] = ProcessState(
            identity_of(run, rank), Anchor(0, 0, 0), RankStatistics(), facts=facts
        )
    return made


def written(run: RunDirectory, samples: list[Sample]) -> None:
    SampleWriter(run, NODE).write(samples, 1 << 20)


def series_of(run: RunDirectory, ranks: list[int]) -> dict[tuple[str, str], Any]:
    notes: list[str] = []
    found = read_hardware_series(
        run, processes(run), dict.fromkeys((0, 1), NODE), ranks, BEGIN_NS, notes
    )
    assert notes == []
    return {(each["title"], each["where"]): each for each in found}


def gpu(uuid: str, second: int, **values: Any) -> Sample:
    values["interval_ns"] = SECOND
    return gpu_sample(uuid, second * SECOND, BEGIN_NS + second * SECOND, **values)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


def test_gauges_become_levels_and_counters_rates_and_throttling_a_share(run: RunDirectory) -> None:
    """Counters are growth per second, and throttling is a share of time.

    Quantities without samples, and GPUs of other ranks, have no line.
    """
    samples = [
        gpu(
            uuid, second, sm_clock_hz=10**9 + second, temperature_c=60 + second,
            throttle_thermal_ns=second * SECOND // 4, throttle_power_ns=0, nvlink_received_bytes=second * 1000,
        )
        for second in range(4)
        for uuid in ("GPU-0", "GPU-1", "GPU-of-others")
    ]  # fmt: skip
    written(run, samples)
    found = series_of(run, [0])

    assert {where for _, where in found} == {"rank 0"}
    clock = found["SM clock", "rank 0"]
    assert (clock["unit"], clock["rank"], clock["time_s"]) == ("Hz", 0, [0, 1, 2, 3])
    assert clock["value"] == [pytest.approx(10**9 + second, rel=1e-4) for second in range(4)]
    assert found["Throttled by heat", "rank 0"]["value"] == [None, 25, 25, 25]
    assert found["NVLink received", "rank 0"]["value"] == [None, 1000, 1000, 1000]
    titles = {title for title, _ in found}
    # Throttling by the power limit was measured and did not occur.
    assert "throttled by the power limit" not in titles
    assert "GPU power" not in titles


def test_reset_counter_of_a_port_gives_no_negative_rate(run: RunDirectory) -> None:
    counts = [100, 300, 50, 150]
    links = [
        port_sample(
            "mlx5_0",
            1,
            second * SECOND,
            BEGIN_NS + second * SECOND,
            transmitted_bytes=count,
            link_downs=second // 3,
        )
        for second, count in enumerate(counts)
    ]
    written(run, links)
    found = series_of(run, [0, 1])

    assert found["Network transmitted", f"{NODE} mlx5_0 port 1"]["value"] == [None, 200, 0, 100]
    assert found["Network port: link downs", f"{NODE} mlx5_0 port 1"]["value"] == [0, 0, 0, 1]


def test_points_of_long_runs_are_means_of_intervals(run: RunDirectory) -> None:
    """A line has at most MAX_POINTS points."""
    written(run, [gpu("GPU-0", second, power_w=float(second)) for second in range(2000)])
    power = series_of(run, [0])["GPU power", "rank 0"]

    assert len(power["value"]) == MAX_POINTS
    assert sum(power["value"]) / MAX_POINTS == pytest.approx(999.5, rel=0.01)
    assert power["time_s"] == sorted(power["time_s"])


def test_series_beyond_the_budget_are_noted(run: RunDirectory) -> None:
    """The first quantities of all objects have priority."""
    written(
        run,
        [
            gpu(f"GPU-{rank}", second, sm_clock_hz=1, power_w=1.0)
            for second in range(9)
            for rank in (0, 1)
        ],
    )
    every = list(series_of(run, [0, 1]).values())
    notes: list[str] = []
    kept = trim_series(every, 400, notes)

    assert [each["title"] for each in kept] == ["SM clock", "SM clock"]
    assert notes == ["Only 2 of 4 quantities that were measured over time are shown."]
    assert trim_series(every, 10_000, []) == sorted(every, key=lambda each: each["title"])


def test_processes_have_cpu_time_and_memory_and_share_the_network_of_their_node(
    run: RunDirectory,
) -> None:
    """Ranks of one node share one series of its network."""
    samples = [
        Sample(
            PROCESSES, str(rank), second * SECOND, BEGIN_NS + second * SECOND, {
                "rank": rank, "cpu_ns": 3 * second * SECOND // 2, "resident_bytes": 1000,
                "network_received_bytes": 500 * second,
            },
        )
        for second in range(3)
        for rank in (0, 1)
    ]  # fmt: skip
    written(run, samples)
    found = series_of(run, [1])

    assert found["CPU used, in percent of one core", "rank 1"]["value"] == [None, 150, 150]
    assert found["Resident memory, with workers", "rank 1"]["value"] == [1000, 1000, 1000]
    assert found["Network received, all interfaces", NODE]["value"] == [None, 500, 500]
    assert {where for _, where in found} == {"rank 1", NODE}
    # Disk traffic was not measured, so it has no series of zeros.
    assert not [title for title, _ in found if title.startswith("Disk")]


def test_process_with_one_sample_has_no_rate(run: RunDirectory) -> None:
    values = {"rank": 0, "read_bytes": 5, "resident_bytes": 9}
    written(run, [Sample(PROCESSES, "0", 0, BEGIN_NS, values)])
    assert {title for title, _ in series_of(run, [0])} == {"Resident memory, with workers"}
