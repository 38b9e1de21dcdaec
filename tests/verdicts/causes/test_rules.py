"""Why a rank is slow, from signals: each cause with its evidence and next action, and none where nothing fits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.findings import episode, findings
from tests.support.planted import places
from tests.support.saved import saved
from torchlens_perf.verdicts.causes.metrics import METRICS, vector
from torchlens_perf.verdicts.causes.rules import diagnose
from torchlens_perf.verdicts.causes.straggler_groups import with_groups
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import Cause, Diagnosis, StragglerGroup
from torchlens_perf.verdicts.words.stragglers import SlowRankContext, straggler_verdicts

SLOW = 3
# What a healthy rank has; the episode of tests/support/findings.py loses 20 ms of 100 a step.
HEALTHY = {
    "cpu_wait_share": 0.02, "asleep_share": 0.02, "kernel_share": 0.02, "gc_share": 0.0, "disk_wait_share": 0.0,
    "major_faults_per_s": 0.0, "refaults_per_s": 0.0, "memory_limit_share": 0.5, "memory_stall_share": 0.0,
    "cpu_quota_share": 0.0, "cpu_clock_share": 0.9, "sm_clock_mhz": 1980.0, "sm_clock_share": 1.0,
    "thermal_share": 0.0, "power_share": 0.1,
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
    """Of rank SLOW, whose signals are a healthy rank's but for these; the other ranks' are in `others`."""
    rows = {rank: {**HEALTHY, **(others or {})} for rank in range(4)}
    for rank in (SLOW, *together):
        rows[rank] = {**HEALTHY, **changed}
    during = {rank: vector(row).astype(np.float32) for rank, row in rows.items()}
    earlier = None if before is None else vector({**HEALTHY, **before}).astype(np.float32)
    return diagnose(slow or episode(SLOW, phase="host"), during, earlier, together, details)


def only(found: Diagnosis) -> Cause:
    (cause,) = found.causes
    return cause


@pytest.mark.parametrize(
    ("kind", "phase", "changed", "words"),
    [
        ("gc", "host", {"gc_share": 0.2}, "collector runs in it for 20% of the time, against 0.0% on the others"),
        (
            "busy_neighbour",
            "cpu",
            {"cpu_wait_share": 0.2, "neighbour_share": 0.6},
            "keep 60% of its CPUs busy, most of all yes (pid 7)",
        ),
        ("own_threads", "cpu", {"cpu_wait_share": 0.2, "neighbour_share": 0.0}, "threads, workers and ranks compete"),
        ("no_cpu", "cpu", {"cpu_wait_share": 0.2}, "is ready without a CPU for 20% of the time"),
        (
            "cpu_quota",
            "cpu",
            {"cpu_wait_share": 0.2, "cpu_quota_share": 0.18},
            "control group /pod uses up its CPU quota in 18% of",
        ),
        ("slow_storage", "data", {"asleep_share": 0.2, "disk_wait_share": 0.2}, "for a disk for 20% of the time"),
        (
            "memory_pressure",
            "data",
            {"asleep_share": 0.15, "kernel_share": 0.06, "major_faults_per_s": 800.0, "refaults_per_s": 700.0},
            "its control group /pod has to evict pages that it needs again: it waits for 800 pages a second, against 0",
        ),
        (
            "memory_pressure",
            "forward",
            {"asleep_share": 0.2, "major_faults_per_s": 300.0, "memory_stall_share": 0.3},
            "memory is short on its node: it waits for 300 pages a second, against 0",
        ),
        ("cpu_clock", "host", {"cpu_clock_share": 0.6}, "CPU runs at 60% of its highest clock, against 90% usually"),
        (
            "gpu_throttled",
            "compute",
            {"sm_clock_mhz": 1200.0, "sm_clock_share": 0.606, "thermal_share": 0.8, "temperature_c": 91.0},
            "GPU 5's SM clock is 1.20 GHz, 39% below the usual; it was throttled for 80% of the time, for temperature "
            "at 91 C",
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
        ("gpu_errors", "compute", {"xids_per_s": 0.05}, "errors of the driver (XID): 3 a minute, against none"),
        ("gpu_errors", "compute", {"ecc_errors_per_s": 0.5}, "uncorrectable ECC errors: 30 a minute"),
        ("gpu_errors", "compute", {"remapped_rows_per_s": 0.02}, "rows of its memory remapped"),
        ("pcie", "compute", {"pcie_replays_per_s": 40.0}, "PCIe replays: 40 a second, against 6 a minute"),
        ("nvlink", "compute", {"nvlink_errors_per_s": 2.0}, "NVLink errors: 2 a second"),
        ("network", "compute", {"link_errors_per_s": 2.0}, "its node has InfiniBand errors: 2 a second"),
        ("alloc_retries", "forward", {"alloc_retries_per_step": 0.25}, "runs out once in 4 steps"),
    ],
)
def test_each_cause(kind: str, phase: str, changed: dict[str, float], words: str) -> None:
    """What is planted is named, with its numbers and an action, and nothing else is."""
    details = {"neighbour": "yes (pid 7)", "control_group": "/pod", "gpu": "GPU 5"}
    cause = only(diagnosis(changed, slow=episode(SLOW, phase=phase), **details))

    assert cause.kind == kind
    assert words in cause.text
    assert cause.action.endswith(".")
    assert all(cause.evidence[signal] == pytest.approx(value, rel=0.01) for signal, value in changed.items())


def test_none() -> None:
    """A healthy rank has no cause; what was looked at is told apart from what was not measured."""
    found = diagnosis({})
    unmeasured = {rank: vector({"gc_share": 0.0}).astype(np.float32) for rank in range(4)}
    on_a_cpu = diagnose(episode(SLOW), unmeasured, None)

    assert found.causes == ()
    assert len(found.looked_at) == 11
    assert found.not_measured == ()
    assert on_a_cpu.looked_at == ("garbage collection",)
    assert "GPU clocks and throttling" in on_a_cpu.not_measured
    assert diagnose(episode(SLOW), {}, None).looked_at == ()


def test_a_rank_that_lacks_a_cpu_is_not_said_to_wait_for_none() -> None:
    """The signal is of the training thread; autograd's may be the one that waits."""
    unmeasured = {rank: vector({"gc_share": 0.0, "cpu_wait_share": 0.0}).astype(np.float32) for rank in range(4)}

    assert diagnose(episode(SLOW), unmeasured, None).looked_at == ("garbage collection", "waits for a CPU")
    assert diagnose(episode(SLOW, phase="cpu"), unmeasured, None).looked_at == ("garbage collection",)


@pytest.mark.parametrize(
    "changed",
    [
        {"gc_share": 0.05},
        {"asleep_share": 0.07, "disk_wait_share": 0.07},
        {"asleep_share": 0.3},  # it sleeps, but not for a disk
        {"major_faults_per_s": 500.0},  # they cost it nothing
        {"sm_clock_mhz": 1950.0, "sm_clock_share": 0.985, "power_share": 0.6},  # clocks differ that much by themselves
        {"sm_clock_mhz": 1900.0, "sm_clock_share": 0.96, "power_share": 0.9},  # a sixth of what it loses
        {"sm_clock_mhz": 1410.0, "sm_clock_share": 1.0},  # another kind of GPU, at its highest clock
        {"asleep_share": 0.1, "major_faults_per_s": 900.0, "memory_limit_share": 0.99},  # pages that it never had
        {"nvlink_errors_per_s": 1 / 1200},
        {"pcie_replays_per_s": 0.5},
        {"alloc_retries_per_step": 0.02},
        {"temperature_c": 90.0},
        {"cpu_wait_share": 0.2, "neighbour_share": 0.9},  # its work does not hold that
    ],
)
def test_too_little_to_explain_it(changed: dict[str, float]) -> None:
    """What takes far less than the rank loses is no cause of it."""
    assert diagnosis(changed, slow=episode(SLOW, phase="compute")).causes == ()


@pytest.mark.parametrize(
    "changed",
    [
        {"gc_share": 0.2}, {"asleep_share": 0.2, "disk_wait_share": 0.2},
        {"sm_clock_mhz": 1200.0, "sm_clock_share": 0.6, "power_share": 0.8},
        {"xids_per_s": 0.05}, {"alloc_retries_per_step": 1.0},
    ],
)  # fmt: skip
def test_what_all_have_or_had_before(changed: dict[str, float]) -> None:
    """It is no cause if the other ranks have it too, or if the rank had it when it was not slow."""
    assert diagnosis(changed, others=changed).causes == ()
    assert diagnosis(changed, before=changed).causes == ()
    assert len(diagnosis(changed, before={}).causes) == 1


def test_what_is_measured_nowhere_else_stands_out_from_nothing() -> None:
    """A node whose neighbours have no telemetry: its replays may be what all have. A quota is there or is not."""
    rows = {rank: {**HEALTHY, "cpu_wait_share": 0.2 * (rank == SLOW)} for rank in range(4)}
    for rank, row in rows.items():
        if rank != SLOW:
            del row["pcie_replays_per_s"], row["cpu_quota_share"]
    rows[SLOW] |= {"pcie_replays_per_s": 50.0, "cpu_quota_share": 0.5}
    during = {rank: vector(row).astype(np.float32) for rank, row in rows.items()}

    assert diagnose(episode(SLOW, phase="host"), during, None).causes == ()
    (cause,) = diagnose(episode(SLOW, phase="cpu"), during, None).causes
    assert cause.kind == "cpu_quota"


def test_ranks_that_are_slow_together_are_no_comparison() -> None:
    """A node whose ranks are all throttled."""
    changed = {"sm_clock_mhz": 1200.0, "sm_clock_share": 0.6, "thermal_share": 0.8}

    assert only(diagnosis(changed, together=(2, SLOW))).kind == "gpu_throttled"


def test_several() -> None:
    """The one that explains most comes first; evidence that takes no time by itself, after what does."""
    found = diagnosis({"gc_share": 0.08, "asleep_share": 0.12, "disk_wait_share": 0.12, "nvlink_errors_per_s": 1.0})

    assert [cause.kind for cause in found.causes] == ["slow_storage", "gc", "nvlink"]
    assert [cause.explains for cause in found.causes] == [
        pytest.approx(0.5, rel=0.01),
        pytest.approx(0.4, rel=0.01),
        None,
    ]


def verdict(found: Diagnosis, **changed: Any) -> Any:
    slow = episode(SLOW, phase="host", **changed)
    group = StragglerGroup("rank", "", (SLOW,), slow, "node-0", diagnosis=found)
    (now,), _ = straggler_verdicts(SlowRankContext(()), findings(slow, groups=(group,)))
    return now


def test_in_words() -> None:
    """The verdict says why, with how much of it that explains, and what to do about that."""
    told = verdict(diagnosis({"gc_share": 0.2, "nvlink_errors_per_s": 1.0}))

    assert "since step 100. Because Python's garbage collector runs in it for 20% of the time" in told.sentence
    assert "(which explains 100% of it). Seen on it alone: its GPU has NVLink errors: 1 a second" in told.sentence
    assert "Next: call gc.freeze()" in told.sentence
    assert [cause.kind for cause in told.evidence.diagnosis.causes] == ["gc", "nvlink"]
    assert told.evidence.diagnosis.signals["gc_share"] == pytest.approx(0.2, rel=0.01)


def test_what_is_only_seen_is_no_because() -> None:
    """An error that takes no time by itself is told as what it is, and the next action stays that of the phase."""
    told = verdict(diagnosis({"xids_per_s": 0.001}))

    assert "Because" not in told.sentence
    assert (
        "Seen on it alone: its GPU has errors of the driver (XID): 4 an hour, against none on the others; look them up "
        "in the kernel's log; drain the node. Next: look for what only rank 3 does"
    ) in told.sentence


@pytest.mark.parametrize("phase", ["data", "cpu"])
def test_a_device_is_not_behind_that(phase: str) -> None:
    """A GPU that is waited for by nobody explains no wait for data, and none for a CPU."""
    changed = {"sm_clock_mhz": 1200.0, "sm_clock_share": 0.6, "thermal_share": 0.8, "xids_per_s": 1.0}
    changed |= {"alloc_retries_per_step": 1.0, "link_errors_per_s": 1.0}

    assert diagnosis(changed, slow=episode(SLOW, phase=phase)).causes == ()


def test_steps_too_short_to_tell_waiting_from_work() -> None:
    """In short steps time without a CPU is part of the work: there it may be the cause of any phase."""
    rows = {rank: {**HEALTHY, "cpu_wait_share": 0.3 * (rank == SLOW), "neighbour_share": 0.5} for rank in range(4)}
    for row in rows.values():
        del row["asleep_share"]
    during = {rank: vector(row).astype(np.float32) for rank, row in rows.items()}

    (cause,) = diagnose(episode(SLOW), during, None).causes
    assert cause.kind == "busy_neighbour"


def test_no_cause_in_words() -> None:
    """That none was found is said, with what was looked at; where nothing was measured, nothing is said."""
    assert "No cause found among garbage collection, waits for a CPU, " in verdict(diagnosis({})).sentence
    assert "Next: look for what only rank 3 does" in verdict(diagnosis({})).sentence
    assert "ause" not in verdict(diagnose(episode(SLOW), {}, None)).sentence


def test_kept() -> None:
    """A diagnosis survives the state file."""
    slow = episode(SLOW, phase="data")
    named = with_groups(findings(slow), places(8), diagnosed=lambda group: diagnosis({"gc_share": 0.2}))

    assert saved(named) == named
    assert named.groups[0].diagnosis is not None
    assert len(METRICS) == len(set(METRICS))
