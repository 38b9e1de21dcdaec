"""Programs for torch_openreg, PyTorch's reference backend.

torch supports one added device per process, so each program runs in a process of its own.

Usage: python -m tests.device.openreg abilities|plain|watched FOLDER STEPS
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch
import torch_openreg  # type: ignore[import-not-found]  # noqa: F401  # makes itself torch's accelerator
from torch import nn

from tests.support.recording import Recording, recorded
from torchlens_perf.recorder.device_abilities import ABILITIES, find_ability_problem
from torchlens_perf.run.ring import Kind

DEVICE = "openreg"


def waits() -> int:
    """Return the number of waits of the host for the device."""
    return int(ctypes.CDLL(None).openreg_waits())


def abilities() -> dict[str, Any]:
    """Return doctor's findings, and whether an event between two streams orders their work."""
    problems = {each.name: find_ability_problem(each, torch.device(DEVICE)) for each in ABILITIES}
    before = waits()
    torch.accelerator.synchronize()
    counted = waits() - before
    stream, current = torch.Stream(DEVICE), torch.accelerator.current_stream()
    first, second = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    first.record(current)
    stream.wait_event(first)
    second.record(stream)
    second.synchronize()
    return {
        "problems": problems,
        "counted": counted,
        "apart_ms": first.elapsed_time(second),
        "reached": first.query(),
    }


def trained(folder: Path, steps: int, *, watched: bool) -> dict[str, Any]:
    """Train in one process and return losses, parameters, the number of waits, and records."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses, counted = list[torch.Tensor](), [0]

    def loop() -> None:
        before = waits()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        counted[0] = waits() - before

    recording = Recording()
    if watched:
        with recorded(folder, model, optimizer, modules="all", backward_every=0) as recording:
            loop()
            torch.accelerator.synchronize()
            assert recording.watch is not None
            recording.watch.step()  # Device times are read at a step's end.
    else:
        loop()
    return {
        "numbers": [each.detach().cpu() for each in [*losses, *model.parameters()]],
        "waits": counted[0],
        "spans": [
            (Kind(each.value0).name, each.step, each.start_ns, each.duration_ns)
            for each in recording.records
            if each.kind == Kind.DEVICE
        ],
        "errors": recording.internal_errors,
        "metadata": {name: recording.metadata.get(name) for name in ("device", "notes")},
    }


if __name__ == "__main__":
    what, to, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.save(
        abilities() if what == "abilities" else trained(to, steps, watched=what == "watched"),
        to / f"{what}.pt",
    )
