"""Train some steps under watch() on the asynchronous device, then replay a graph of a step.

Prints the duration of a replay on the device in ms, by the device's own events.
"""

from __future__ import annotations

import torch
from torch import nn

import torchlens_perf as perf
from tests.device import device

EAGER, REPLAYS, KERNEL_S = 5, 120, 0.004


def main() -> None:
    torch.set_num_threads(1)
    device.load()
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).to(device.NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.ones(4, 32, device=device.NAME)

    def step() -> None:
        device.spin(KERNEL_S)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def event() -> torch.Event:
        recorded = torch.Event(device.NAME, enable_timing=True)
        recorded.record(torch.accelerator.current_stream())
        return recorded

    with perf.watch(model, optimizer) as recording:
        for _ in range(EAGER):
            step()
        replay = device.capture_graph(step)
        begin = event()
        for _ in range(REPLAYS):
            replay()
            recording.step()
        end = event()
        end.synchronize()
    print(begin.elapsed_time(end) / REPLAYS)


main()
