"""Diagnosis of slow ranks by signals: causes with evidence and action, or no cause."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.findings import episode, findings
from tests.support.planted import places
from tests.support.saved import save_and_load
from torchlens_perf.verdicts.causes.metrics import METRICS, encode_signals
from torchlens_perf.verdicts.causes.rules import diagnose
from torchlens_perf.verdicts.causes.straggler_groups import add_straggler_groups
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import Cause, Diagnosis, StragglerGroup
from torchlens_perf.verdicts.words.causes import describe_cause
from torchlens_perf.verdicts.words.stragglers import SlowRankContext, build_straggler_verdicts

SLOW = 3
# Signals of a healthy rank. The episode of tests/support/findings.py has an excess of 20 ms in a
# step of 100 ms.
HEALTHY = {
    "cpu_wait_share": 0.02, "asleep_share": 0.02, "kernel_share": 0.02, "gc_share": 0.0, "disk_wait_share": 0.0,
    "major_faults_per_s": 0.0, "refaults_per_s": 0.0, "memory_limit_share": 0.5, "memory_stall_share": 0.0,
    "cpu_quota_share": 0.0, "cpu_clock_share": 0.9, "sm_clock_mhz": 1980.0, "sm_clock_share": 1.0,
    "thermal_share": 0.0, "power_share": 0.1, "gpu_neighbour_share": 0.02,
    "hw_slowdown_share": 0.0, "temperature_c": 60.0, "ecc_errors_per_s": 0.0, "remapped_rows_per_s": 0.0,
    "xids_per_s": 0.0, "pcie_replays_per_s": 0.1, "nvlink_errors_per_s": 0.0, "link_errors_per_s": 0.0,
    "alloc_retries_per_step": 0.0,
}  # fmt: skip


def diagnosis(
    changed: dict[str, float],
    *,
    slow: Episode | None = None,
    before: dict[str, float] | None = None,
    together: tuple[int, ...] = (),
    others: dict[str, float] | None = None,
    **details: str,
) -> Diagnosis:
    """Diagnose rank SLOW.

    `changed` has the signals in which the slow rank differs from a healthy one, `others` those in
    which the other ranks do.
    """
    rows = {rank: {**HEALTHY, **(others or {})} for rank in range(4)}
    for rank in (SLOW, *together):
        rows[rank] = {**HEALTHY, **changed}
    during = {rank: encode_signals(row).astype(np.float32) for rank, row in rows.items()}
    earlier = None if before is None else encode_signals({**HEALTHY, **before}).astype(np.float32)
    return diagnose(slow or episode(SLOW, phase="host"), during, earlier, together, details)


def only(found: Diagnosis) -> Cause:
    (cause,) = found.causes
    return cause


@pytest.mark.parametrize(
    ("kind", "phase", "changed", "words"),
    [
        (
            "gc",
            "host",
            {"gc_share": 0.2},
            "collector takes 20% of the step time of rank 3, against 0.0% on the others",
        ),
        (
            "busy_neighbour",
            "cpu",
            {"cpu_wait_share": 0.2, "neighbour_share": 0.6},
            "keep 60% of its CPUs busy, most of all yes (pid 7)",
        ),
        (
            "own_threads",
            "cpu",
            {"cpu_wait_share": 0.2, "neighbour_share": 0.0},
            "threads, workers and ranks compete",
        ),
        (
            "no_cpu",
            "cpu",
            {"cpu_wait_share": 0.2},
            "is runnable but has no CPU for 20% of the time",
        ),
        (
            "cpu_quota",
            "cpu",
            {"cpu_wait_share": 0.2, "cpu_quota_share": 0.18},
            "control group /pod uses up its CPU quota in 18% of",
        ),
        (
            "slow_storage",
            "data",
            {"asleep_share": 0.2, "disk_wait_share": 0.2},
            "for a disk for 20% of the time",
        ),
        (
            "memory_pressure",
            "data",
            {
                "asleep_share": 0.15,
                "kernel_share": 0.06,
                "major_faults_per_s": 800.0,
                "refaults_per_s": 700.0,
            },
            (
                "the control group /pod has to evict pages that it needs again: rank 3 waits for"
                " 800 pages a second, against 0"
            ),
        ),
        (
            "memory_pressure",
            "forward",
            {"asleep_share": 0.2, "major_faults_per_s": 300.0, "memory_stall_share": 0.3},
            "memory is short on the node: rank 3 waits for 300 pages a second, against 0",
        ),
        (
            "cpu_clock",
            "host",
            {"cpu_clock_share": 0.6},
            "CPU of rank 3 runs at 60% of its highest clock, against 90% usually",
        ),
        (
            "gpu_throttled",
            "compute",
            {
                "sm_clock_mhz": 1200.0,
                "sm_clock_share": 0.606,
                "thermal_share": 0.8,
                "temperature_c": 91.0,
            },
            (
                "GPU 5's SM clock is 1.20 GHz, 39% below the usual; it was throttled for 80% of the"
                " time, for temperature at 91 C"
            ),
        ),
        (
            "gpu_throttled",
            "compute",
            {"sm_clock_mhz": 1700.0, "sm_clock_share": 0.86, "power_share": 0.9},
            "90% of the time, for its power",
        ),
        (
            "gpu_throttled",
            "compute",
            {"sm_clock_mhz": 900.0, "sm_clock_share": 0.45, "hw_slowdown_share": 0.9},
            "for the board's slowdown",
        ),
        (
            "gpu_clock",
            "compute",
            {"sm_clock_mhz": 1410.0, "sm_clock_share": 0.71},
            "SM clock is 1.41 GHz, 29% below the usual",
        ),
        (
            "gpu_neighbour",
            "compute",
            {"gpu_neighbour_share": 0.35},
            "programs outside the job use GPU 5 for 35% of the time, against 2.0% on the others",
        ),
        (
            "gpu_errors",
            "compute",
            {"xids_per_s": 0.05},
            "errors of the driver (XID): 3 a minute, against none",
        ),
        (
            "gpu_errors",
            "compute",
            {"ecc_errors_per_s": 0.5},
            "uncorrectable ECC errors: 30 a minute",
        ),
        ("gpu_errors", "compute", {"remapped_rows_per_s": 0.02}, "memory rows that were remapped"),
        (
            "pcie",
            "compute",
            {"pcie_replays_per_s": 40.0},
            "PCIe replays: 40 a second, against 6 a minute",
        ),
        ("nvlink", "compute", {"nvlink_errors_per_s": 2.0}, "NVLink errors: 2 a second"),
        (
            "network",
            "compute",
            {"link_errors_per_s": 2.0},
            "the node of rank 3 has InfiniBand errors: 2 a second",
        ),
        (
            "alloc_retries",
            "forward",
            {"alloc_retries_per_step": 0.25},
            "runs out of memory once in 4 steps",
        ),
    ],
)
def test_planted_cause_is_the_only_one_in_the_diagnosis(
    kind: str, phase: str, changed: dict[str, float], words: str
) -> None:
    """The cause has its numbers, its evidence and an action."""
    details = {"neighbour": "yes (pid 7)", "control_group": "/pod", "gpu": "GPU 5"}
    cause = only(diagnosis(changed, slow=episode(SLOW, phase=phase), **details))

    assert cause.kind == kind
    assert words in describe_cause(cause, 3)[0]
    assert describe_cause(cause, 3)[1].endswith(".")
    assert all(
        cause.evidence[signal] == pytest.approx(value, rel=0.01)
        for signal, value in changed.items()
    )


def test_diagnosis_of_a_healthy_rank_has_no_cause() -> None:
    """Possible causes that were measured are listed, and separately those that were not."""
    found = diagnosis({})
    unmeasured = {rank: encode_signals({"gc_share": 0.0}).astype(np.float32) for rank in range(4)}
    on_a_cpu = diagnose(episode(SLOW), unmeasured, None)

    assert found.causes == ()
    assert len(found.looked_at) == 11
    assert found.not_measured == ()
    assert on_a_cpu.looked_at == ("garbage collection",)
    assert "GPU clocks and throttling" in on_a_cpu.not_measured
    assert diagnose(episode(SLOW), {}, None).looked_at == ()


def test_lack_of_cpu_is_not_ruled_out_for_a_rank_in_phase_cpu() -> None:
    """The signal is measured on the training thread.

    The autograd thread may be the one that waits.
    """
    unmeasured = {
        rank: encode_signals({"gc_share": 0.0, "cpu_wait_share": 0.0}).astype(np.float32)
        for rank in range(4)
    }

    assert diagnose(episode(SLOW), unmeasured, None).looked_at == (
        "garbage collection",
        "waits for a CPU",
    )
    assert diagnose(episode(SLOW, phase="cpu"), unmeasured, None).looked_at == (
        "garbage collection",
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"gc_share": 0.05},
        {"asleep_share": 0.07, "disk_wait_share": 0.07},
        {"asleep_share": 0.3},  # The rank sleeps, but does not wait for a disk.
        {"major_faults_per_s": 500.0},  # The page faults take no time.
        {
            "sm_clock_mhz": 1950.0,
            "sm_clock_share": 0.985,
            "power_share": 0.6,
        },  # GPU clocks usually differ by up to this much.
        {
            "sm_clock_mhz": 1900.0,
            "sm_clock_share": 0.96,
            "power_share": 0.9,
        },  # The low clock explains only a sixth of the excess.
        {
            "sm_clock_mhz": 1410.0,
            "sm_clock_share": 1.0,
        },  # This is another kind of GPU at its highest clock.
        {
            "asleep_share": 0.1,
            "major_faults_per_s": 900.0,
            "memory_limit_share": 0.99,
        },  # The page faults are first reads of pages.
        {"nvlink_errors_per_s": 1 / 1200},
        {"pcie_replays_per_s": 0.5},
        {"alloc_retries_per_step": 0.02},
        {"temperature_c": 90.0},
        # Compute time does not contain waits for a CPU.
        {"cpu_wait_share": 0.2, "neighbour_share": 0.9},
    ],
)
def test_signal_that_explains_little_of_the_excess_is_no_cause(changed: dict[str, float]) -> None:
    assert diagnosis(changed, slow=episode(SLOW, phase="compute")).causes == ()


@pytest.mark.parametrize(
    "changed",
    [
        {"gc_share": 0.2}, {"asleep_share": 0.2, "disk_wait_share": 0.2},
        {"sm_clock_mhz": 1200.0, "sm_clock_share": 0.6, "power_share": 0.8},
        {"xids_per_s": 0.05}, {"alloc_retries_per_step": 1.0},
    ],
)  # fmt: skip
def test_signal_of_all_ranks_or_of_earlier_steps_is_no_cause(changed: dict[str, float]) -> None:
    assert diagnosis(changed, others=changed).causes == ()
    assert diagnosis(changed, before=changed).causes == ()
    assert len(diagnosis(changed, before={}).causes) == 1


def test_signal_without_comparison_is_no_cause_except_a_cpu_quota() -> None:
    """Other ranks have no telemetry, so their CUDA graph replays may be as frequent.

    A CPU quota needs no comparison.
    """
    rows = {rank: {**HEALTHY, "cpu_wait_share": 0.2 * (rank == SLOW)} for rank in range(4)}
    for rank, row in rows.items():
        if rank != SLOW:
            del row["pcie_replays_per_s"], row["cpu_quota_share"]
    rows[SLOW] |= {"pcie_replays_per_s": 50.0, "cpu_quota_share": 0.5}
    during = {rank: encode_signals(row).astype(np.float32) for rank, row in rows.items()}

    assert diagnose(episode(SLOW, phase="host"), during, None).causes == ()
    (cause,) = diagnose(episode(SLOW, phase="cpu"), during, None).causes
    assert cause.kind == "cpu_quota"


def test_ranks_that_are_slow_together_are_not_compared_with_each_other() -> None:
    """All ranks of a node are throttled."""
    changed = {"sm_clock_mhz": 1200.0, "sm_clock_share": 0.6, "thermal_share": 0.8}

    assert only(diagnosis(changed, together=(2, SLOW))).kind == "gpu_throttled"


def test_causes_are_ordered_by_the_share_that_they_explain() -> None:
    """Evidence that explains no time comes last."""
    found = diagnosis(
        {
            "gc_share": 0.08,
            "asleep_share": 0.12,
            "disk_wait_share": 0.12,
            "nvlink_errors_per_s": 1.0,
        }
    )

    assert [cause.kind for cause in found.causes] == ["slow_storage", "gc", "nvlink"]
    assert [cause.explains for cause in found.causes] == [
        pytest.approx(0.5, rel=0.01),
        pytest.approx(0.4, rel=0.01),
        None,
    ]


def verdict(found: Diagnosis, **changed: Any) -> Any:
    slow = episode(SLOW, phase="host", **changed)
    group = StragglerGroup("rank", "", (SLOW,), slow, "node-0", diagnosis=found)
    (now,), _ = build_straggler_verdicts(SlowRankContext(()), findings(slow, groups=(group,)))
    return now


def test_verdict_has_cause_explained_share_and_action() -> None:
    told = verdict(diagnosis({"gc_share": 0.2, "nvlink_errors_per_s": 1.0}))

    assert (
        "since step 100. Cause: Python's garbage collector takes 20% of the step time of rank 3"
        in told.sentence
    )
    assert (
        "which explains 100% of the difference. Not seen on other ranks: the GPU of the rank has"
        " NVLink errors: 1 a second" in told.sentence
    )
    assert "Next: call gc.freeze()" in told.sentence
    assert [cause.kind for cause in told.diagnosis.causes] == ["gc", "nvlink"]
    assert told.diagnosis.signals["gc_share"] == pytest.approx(0.2, rel=0.01)


def test_hardware_error_that_explains_no_time_is_not_called_the_cause() -> None:
    """The recommended action remains that for a slow phase."""
    told = verdict(diagnosis({"xids_per_s": 0.001}))

    assert (
        "since step 100. Cause: none found that takes this time."
        " Not seen on other ranks: the GPU of the rank has errors of the driver (XID): 4 an hour, against none"
        " on the others; look them up in the kernel's log; drain the node. Next: look for what only"
        " rank 3 does" in told.sentence
    )


@pytest.mark.parametrize("phase", ["data", "cpu"])
def test_device_is_no_cause_of_waiting_for_data_or_a_cpu(phase: str) -> None:
    changed = {
        "sm_clock_mhz": 1200.0,
        "sm_clock_share": 0.6,
        "thermal_share": 0.8,
        "xids_per_s": 1.0,
    }
    changed |= {"alloc_retries_per_step": 1.0, "link_errors_per_s": 1.0}

    assert diagnosis(changed, slow=episode(SLOW, phase=phase)).causes == ()


def test_lack_of_a_cpu_may_explain_any_phase_of_short_steps() -> None:
    """Waits for a CPU are not recorded in short steps, so compute time contains them."""
    rows = {
        rank: {**HEALTHY, "cpu_wait_share": 0.3 * (rank == SLOW), "neighbour_share": 0.5}
        for rank in range(4)
    }
    for row in rows.values():
        del row["asleep_share"]
    during = {rank: encode_signals(row).astype(np.float32) for rank, row in rows.items()}

    (cause,) = diagnose(episode(SLOW), during, None).causes
    assert cause.kind == "busy_neighbour"


def test_verdict_lists_ruled_out_causes_if_none_was_found() -> None:
    """If no signal was measured, the verdict does not mention causes."""
    assert (
        "Cause: none found (checked: garbage collection, waits for a CPU, "
        in verdict(diagnosis({})).sentence
    )
    assert "Next: look for what only rank 3 does" in verdict(diagnosis({})).sentence
    assert "ause" not in verdict(diagnose(episode(SLOW), {}, None)).sentence


def test_diagnosis_read_from_a_state_file_is_unchanged() -> None:
    slow = episode(SLOW, phase="data")
    named = add_straggler_groups(
        findings(slow), places(8), diagnosed=lambda group: diagnosis({"gc_share": 0.2})
    )

    assert save_and_load(named) == named
    assert named.groups[0].diagnosis is not None
    assert len(METRICS) == len(set(METRICS))
