"""Tests of faults planted in real ranks on the asynchronous device.

The live sidecar must name rank and phase.

benchmarks/planted_devices.py has all faults, training methods and healthy runs.
docs/internals/accuracy.md has the results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.planted_device_training import record
from benchmarks.planted_device_truth import KERNEL_MS, KINDS, plant
from benchmarks.planted_on import AsyncDevice
from benchmarks.planted_truth import Truth
from benchmarks.planted_verdicts import judged_again, run_directory, score
from tests.device import device
from tests.support.gloo import run_ranks
from torchlens_perf.report.build import build_report
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE

pytestmark = [
    pytest.mark.distributed, pytest.mark.slow,
    pytest.mark.skipif(device.missing() is not None, reason=str(device.missing())),
]  # fmt: skip
RANKS, STEPS = 2, 120
# Kinds of faults and their seeds.
FAULTS = {"ddp-forward": 1, "fsdp-backward": 2, "tensor-forward": 0}
# While other tests run, the smallest detectable slowdown is larger than in the campaign: up to 16
# ms.
FAULT_MS = 30
# Kinds of loops with steps of 60 ms whose hosts run ahead, and their seeds.
LOOPS = {"launch-clean": 24, "launch-forward": 20, "ahead-optimizer": 22}


def truths() -> list[Truth]:
    """Return faults of the campaign that all cost the same time per step."""
    drawn = [plant(kind, seed, RANKS, STEPS) for kind, seed in FAULTS.items()]
    return [
        dataclasses.replace(
            truth, faults=tuple(dataclasses.replace(fault, ms=FAULT_MS) for fault in truth.faults)
        )
        for truth in drawn
    ]


def loops() -> list[Truth]:
    return [plant(kind, seed, RANKS) for kind, seed in LOOPS.items()]


def train(folder: Path) -> None:
    """Run one rank of all runs."""
    # Raise the priority, because waits for a CPU increase the smallest detectable slowdown.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    rank = dist.get_rank()
    dist.destroy_process_group()
    torch.set_num_threads(1)
    on_device = AsyncDevice()
    on_device.load(KERNEL_MS / 1e3, rank)
    store = dist.FileStore(str(folder / "device-store"), RANKS)
    dist.init_process_group(device.NAME, store=store, rank=rank, world_size=RANKS)
    for truth in [*truths(), *loops()]:
        record(truth, folder, rank, on_device)
        gc.collect()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    device.build()
    run_ranks(train, folder, RANKS)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("truth", truths(), ids=lambda truth: truth.kind)
def test_slow_rank_and_phase_of_a_planted_device_fault_are_named(truth: Truth, runs: Path) -> None:
    """On a busy machine a rank without a free CPU may be named too.

    On a busy machine a second phase may be slow too, and two phases together are named "compute".
    """
    (state,) = node_state.load_all(run_directory(runs / truth.name))
    (fault,) = truth.faults
    report = build_report("run", [state])

    found = {(each.rank, each.phase) for each in state.findings.episodes}
    assert found & {(fault.rank, fault.phase), (fault.rank, "compute")}
    assert {process.judged_by for process in state.processes.values()} == {DEVICE}
    assert report["run"]["judged_by"] == "device"
    parts = [rank["device"]["parts"] for rank in report["ranks"] if rank["device"] is not None]
    others, slow = parts[1 - fault.rank], parts[fault.rank]
    # The fault is only in the last two thirds of the steps, and other tests run at the same time.
    # The required difference is therefore much smaller than the fault.
    assert fault.ms is not None
    assert slow[fault.phase] - others[fault.phase] > 0.3e-3 * fault.ms
    assert others["communication"] - slow["communication"] > 0.2e-3 * fault.ms, (
        "the other one waits for it"
    )


@pytest.mark.long
@pytest.mark.parametrize("truth", loops(), ids=lambda truth: truth.kind)
def test_no_rank_is_named_if_hosts_differ_only_in_launch_gaps(truth: Truth, runs: Path) -> None:
    """Launch gaps would make the last healthy rank slow by device times alone."""
    (state,) = node_state.load_all(run_directory(runs / truth.name))
    named = [each for each in state.findings.episodes if each.phase != "cpu"]

    assert {process.judged_by for process in state.processes.values()} == {DEVICE}
    assert [each.rank for each in named[:1]] == [fault.rank for fault in truth.faults]
    for each, fault in zip(named[:1], truth.faults, strict=True):
        assert (each.phase, each.by_host) == (fault.phase, fault.way == "sleep")
        assert fault.ms is not None
        assert each.cost_ns < 2e6 * fault.ms


@pytest.mark.long
def test_planted_device_fault_is_not_found_by_host_times(runs: Path) -> None:
    """The campaign also scores the same runs by host times."""
    scores = [score(truth, judged_again(runs / truth.name)) for truth in truths()]

    assert not any(each.right_phase for each in scores)


def test_same_kind_and_seed_plant_the_same_fault() -> None:
    """Healthy runs have no fault."""
    for kind in KINDS:
        assert plant(kind, 7) == plant(kind, 7)
        assert bool(plant(kind, 7).faults) != ("clean" in kind)
    with pytest.raises(ValueError, match="unknown kind"):
        plant("ddp-nothing", 0)
