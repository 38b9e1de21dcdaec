"""Tests of aggregate="device" on the asynchronous device.

Rank 0's node names the slow rank from merged device data alone.

Each rank has a separate run directory, as on a node whose sidecar does not exchange data with
others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.device import device
from tests.support.device.async_device import AsyncDevice, driver
from tests.support.device_ranks import DEVICE, begin, parameter_of
from tests.support.gloo import run_ranks
from tests.support.long import long
from tests.support.ranks import run_without_traces
from tests.support.recording import recorded, records_of, ring_of_this_process
from tests.support.reports import as_json, checked
from torchlens_perf.analysis.statistics.device_steps import DeviceStepJoin
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.cuda import section_stamper
from torchlens_perf.hooks import device_hooks
from torchlens_perf.report.build import build_report
from torchlens_perf.run.device.merged_rows import MergedRow, unpack_row
from torchlens_perf.run.device.step_parts import StepPart
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Kind
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.verdicts import node_state

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(device.missing() is not None, reason=str(device.missing())),
]
WINDOW, WINDOWS, SLOW, MS = 16, 6, 1, 1_000_000
FORWARD_S, BACKWARD_S, LATE_S = 0.012, 0.006, 0.008
# Interval of reading the loss, in steps, as in scripts that print it. Reading the loss limits how
# far the device is behind the host.
PRINTED = 8


class Spin(torch.autograd.Function):
    """A module that works in the backward pass."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        device.spin(BACKWARD_S)
        return gradient


class Model(nn.Module):
    def __init__(self, late_s: float) -> None:
        super().__init__()
        self.linear, self.late_s = nn.Linear(16, 16), late_s

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        device.spin(FORWARD_S + self.late_s)
        return Spin.apply(self.linear(value))


def train(late_s: float) -> tuple[list[float], list[torch.Tensor], Callable[[], int]]:
    """Return the losses, the parameters, and a function that trains."""
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(Model(late_s).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses: list[float] = []

    def loop() -> int:
        before = device.synchronizations()
        for number in range(WINDOW * WINDOWS):
            loss = model(torch.ones(8, 16, device=DEVICE)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % PRINTED == PRINTED - 1:
                losses.append(float(loss.detach()))
        return device.synchronizations() - before

    return losses, [*model.parameters()], loop


def one_run(folder: Path, late_s: float, *, watched: bool = True) -> dict[str, Any]:
    """Return one rank's records and results."""
    losses, parameters, loop = train(late_s)
    if not watched:
        synchronizations = loop()
        return {
            "losses": losses,
            "parameters": [*map(parameter_of, parameters)],
            "waited": synchronizations,
        }
    own = folder / f"rank-{dist.get_rank()}"
    with recorded(own, aggregate="device", device_times="on") as recording:
        launches = driver().launches
        synchronizations = loop()
        launches = driver().launches - launches
        assert recording.watch is not None
        assert recording.watch.run_dir is not None
        ring = str(ring_of_this_process(recording.watch.run_dir))
    records = records_of(recording)
    merged = [
        unpack_row(each, recording.interned) for each in records if each["kind"] == Kind.MERGED
    ]
    table = DeviceStepJoin().add_records(records, assemble_steps(records))
    return {
        "losses": losses, "parameters": [*map(parameter_of, parameters)], "waited": synchronizations,
        "rows": [each for each in merged if each.row >= 0], "launches": launches,
        "ring": ring, "host": recording.metadata["identity"]["host"],
        "notes": recording.notes, "errors": recording.internal_errors,
        "steps": table.step, "parts": table.parts_ns, "work": table.own_ns,
    }  # fmt: skip


def ranks_train(folder: Path) -> dict[str, dict[str, Any]]:
    begin(folder)
    device_hooks.find_device_for_kernels = lambda kind: AsyncDevice()  # type: ignore[assignment, return-value]
    section_stamper.MERGE_STEPS = WINDOW
    late_s = LATE_S if dist.get_rank() == SLOW else 0.0
    return {
        "slow": one_run(folder / "slow", late_s),
        "clean": one_run(folder / "clean", 0.0),
        "alone": one_run(folder / "alone", 0.0, watched=False),
    }


@pytest.fixture(scope="module", params=[2, *long(4)])
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, Any]]]:
    """Return the results by rank and run."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    return run_ranks(ranks_train, tmp_path_factory.mktemp("merged"), request.param)


def report_of(folder: Path, *told: dict[str, Any]) -> dict[str, Any]:
    """Return the report of rank 0's node if its sidecar reads the given ranks' records.

    The first of the given ranks must be rank 0.
    """
    host = told[0]["host"]
    with run_without_traces(folder) as run:
        for rank in told:
            # The ring is removed after the sidecar has stored it.
            run.register_ring(host, Path(shutil.copy(rank["ring"], folder)))
        return _report_of(run, host)


def _report_of(run: RunDirectory, host: str) -> dict[str, Any]:
    sidecar = Sidecar(run, host, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.judge_ranks(1e6, final=True)
    sidecar.save_records()
    sidecar.close()
    return as_json(checked(build_report(run.run_id, node_state.load_all(run))))


def windows(rows: list[MergedRow]) -> list[dict[str, list[MergedRow]]]:
    """Return the rows by name for each window, in order."""
    found: dict[int, dict[str, list[MergedRow]]] = {}
    for row in rows:
        found.setdefault(row.step, {}).setdefault(row.name, []).append(row)
    return [found[step] for step in sorted(found)]


def test_merging_adds_no_device_wait_and_changes_no_bit(
    told: list[dict[str, dict[str, Any]]],
) -> None:
    for rank in told:
        for watched in (rank["slow"], rank["clean"]):
            assert watched["losses"] == rank["alone"]["losses"]
            for mine, alone in zip(watched["parameters"], rank["alone"]["parameters"], strict=True):
                assert torch.equal(mine, alone)
            assert watched["waited"] == rank["alone"]["waited"]
            assert watched["errors"] == 0
            assert not any("failed" in note or "is off" in note for note in watched["notes"]), (
                watched["notes"]
            )
    assert len({each["slow"]["launches"] for each in told}) == 1, "all ranks have met equally often"


def test_merged_windows_equal_the_ranks_own_records(told: list[dict[str, dict[str, Any]]]) -> None:
    """Windows contain all steps that the device had finished, of all ranks.

    The windows' medians equal those of the ranks' records.
    """
    found = windows(told[0]["slow"]["rows"])
    assert len(found) >= WINDOWS - 1, "the last one may be on its way"
    by_hand = {
        StepPart.FORWARD: "forward",
        StepPart.BACKWARD: "backward",
        StepPart.OPTIMIZER: "optimizer",
    }
    for window in found[1:]:
        assert window["step work"][0].times > len(told) * WINDOW / 2
        for rows in window.values():
            part = by_hand.get(StepPart(rows[0].row))
            if part is not None:
                of_ranks = [np.median(rank["slow"]["parts"][:, PARTS.index(part)]) for rank in told]
                assert rows[0].median_ns == pytest.approx(
                    sorted(of_ranks)[(len(told) - 1) // 2], abs=0.3 * MS
                )
        # The limits allow for gaps in a step's work, in which a device waits for a host that other
        # tests delay.
        forward = window["forward work"][0]
        assert (forward.slowest, forward.outstanding) == (SLOW, 1)
        assert 0.6 < forward.excess_ns / (LATE_S * 1e9) < 3
        assert window["stalls"][0].slowest != SLOW
    assert all(rank["slow"]["rows"] == [] for rank in told[1:])


def test_slow_rank_is_named_from_merged_windows_alone(
    told: list[dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    """The verdict has the phase, the excess and its source, although the sidecar has no record of
    that rank.
    """
    report = report_of(tmp_path, told[0]["slow"])
    assert [rank["rank"] for rank in report["ranks"]] == [0]
    verdict = report["verdicts"][0]
    assert (verdict["kind"], verdict["rank"], verdict["phase"]) == ("straggler", SLOW, "forward")
    assert verdict["evidence"]["phase_excess_s"] == pytest.approx(LATE_S, rel=0.4)
    assert verdict["cost_s_per_step"] > 0.1 * LATE_S
    assert "Found in statistics merged on devices" in verdict["text"]


def test_merged_windows_add_nothing_when_the_sidecar_has_all_records(
    told: list[dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    """The judge names the rank by its records, and the windows agree."""
    report = report_of(tmp_path, *(rank["slow"] for rank in told))
    assert [rank["rank"] for rank in report["ranks"]] == list(range(len(told)))
    (verdict,) = [each for each in report["verdicts"] if each["kind"] == "straggler"]
    assert (verdict["rank"], verdict["phase"]) == (SLOW, "forward")
    assert verdict["evidence"]["excess_s"] == pytest.approx(LATE_S, abs=0.0015)
    assert "windows" not in verdict["text"]


def test_no_rank_is_named_from_merged_windows_of_a_healthy_run(
    told: list[dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    """The verdict also says that all ranks were compared."""
    report = report_of(tmp_path, told[0]["clean"])
    (verdict,) = [
        each for each in report["verdicts"] if each["kind"] in ("none", "not_compared", "straggler")
    ]
    assert verdict["kind"] == "none"
    assert verdict["evidence"]["compared"] == len(told)
    assert "smallest detectable slowdown" in verdict["text"]
