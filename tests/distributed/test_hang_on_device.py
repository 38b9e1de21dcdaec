"""Tests of two ranks on the asynchronous device, one with a kernel that never ends.

Both hosts issue all their work and continue. The last marks reached by the devices identify the
stuck rank.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.device import device
from tests.support.device_ranks import DEVICE, begin
from tests.support.gloo import run_ranks
from tests.support.hangs import hang_text
from tests.support.progress import rank as progress
from tests.support.recording import recorded
from torchlens_perf.analysis.collectives.hang import find_hang
from torchlens_perf.run.clock import DeviceMark, read_device_mark
from torchlens_perf.run.ring import RingReader
from torchlens_perf.verdicts.words.hang import device_place_from_mark

pytestmark = pytest.mark.skipif(device.missing() is not None, reason=str(device.missing()))
HUNG_AT, STEPS, STUCK, STEP_S = 16, 22, 1, 0.05


class Model(nn.Module):
    """A model whose forward pass takes 10 ms on the device, or never ends."""

    never = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.releases = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.never:
            self.releases.append(device.start_endless_kernel())
        device.spin(0.01)
        return self.linear(value)


def hang(folder: Path) -> tuple[tuple[DeviceMark, str] | None, int]:
    """Return the device's last mark in the ring during the hang, and the number of waits for the
    device until then.
    """
    begin(folder)
    torch.manual_seed(7)
    model = Model().to(DEVICE)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    value = torch.ones(4, 32, device=DEVICE)
    with recorded(folder / str(dist.get_rank()), parallel, optimizer) as recording:
        for number in range(STEPS):
            if number == HUNG_AT:
                torch.accelerator.synchronize()
                waited = device.synchronizations()
            model.never = number == HUNG_AT and dist.get_rank() == STUCK
            parallel(value).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_S)
        waited = device.synchronizations() - waited
        # The hosts are synchronized, because a rank may release its kernel only after both have
        # read their rings.
        dist.all_reduce(torch.zeros(1))
        reader = RingReader(recording.watch._session.ring_path)
        mark = read_device_mark(reader)
        reader.close()
        dist.all_reduce(torch.zeros(1))
        for release in model.releases:
            release()
        torch.accelerator.synchronize()
    return mark, waited


def test_rank_with_an_endless_kernel_is_named_with_step_and_mark(tmp_path: Path) -> None:
    """The last mark that the stuck device reached is the one before its forward pass.

    The watch never waits for the device.
    """
    told = run_ranks(hang, tmp_path)
    assert [waited for _, waited in told] == [0, 0]
    ranks = {
        number: progress(
            number, usual_step_s=STEP_S, inside=(), device=device_place_from_mark(*mark), step=STEPS
        )
        for number, (mark, _) in enumerate(told)
    }
    found = find_hang(ranks, {})
    assert found is not None
    assert (found.kind, [each.progress.rank for each in found.blocking]) == ("device", [STUCK])
    place = ranks[STUCK].device
    assert place.step == HUNG_AT
    assert place.mark.startswith("the beginning of")
    assert (
        f"the device of rank {STUCK} (node-a) is in step {HUNG_AT} after the beginning of"
        in hang_text(found)
    )
