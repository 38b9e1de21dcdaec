"""A rank whose device sections are merged with the others': merging_rank.py DRIVER KERNELS FOLDER [OPTION]

--other-order: rank 1 enters its sections in another order. --unable: rank 1 has no CuPy. --off: rank 1 does not record.
--evaluates: rank 0 has made five forward passes before it trains. --captures: rank 1 captures where a window falls due,
the last time at the end of the run's last step.

Writes, as JSON into FOLDER, the durations that it planted in each window, what is merged in its recording, and how
often somebody waited for the device.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

import torchlens_perf as perf
from tests.support.device.fake_device import FakeDevice, FakeTorchDevice
from tests.support.recording import recorded, records_of
from torchlens_perf.analysis.statistics.device import DeviceStatistics
from torchlens_perf.hooks.on_device.stamps import MERGE_STEPS, StampHook, decline_merging
from torchlens_perf.run.ring import Flag, Kind

MICROSECOND, SLOW = 1000, 2
WINDOWS = 3


def main() -> None:
    driver, kernels, folder, *options = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = Path(folder) / f"libcuda-{rank}.so"
    shutil.copy(driver, own)
    device = FakeDevice(own, Path(kernels))
    torch_device = FakeTorchDevice(device, slots=4, places=256)
    draw = random.Random(rank)
    order = ["attention", "mlp"]
    if "--other-order" in options and rank == 1:
        order.reverse()
    if "--unable" in options and rank == 1:
        torch_device.missing = "CuPy is missing: pip install it"
    planted: list[dict[str, list[int]]] = []
    with recorded(Path(folder) / str(rank)) as recording:
        session = recording.watch._session
        if "--off" in options and rank == 1:
            decline_merging(torch_device)
        else:
            session.attach([StampHook(torch_device, torch_device.now_ns, aggregate=True)])
        if "--evaluates" in options and rank == 0:
            for _ in range(5):
                session.end_step(int(Flag.INFERENCE))  # as a model's forward passes do before it has trained
        synchronizations = device.synchronizations
        for step in range(WINDOWS * MERGE_STEPS):
            if step % MERGE_STEPS == 0:
                planted.append({})
            for name in order:
                slow = 2 if rank == SLOW and name == "mlp" else 1
                duration_ns = slow * draw.randrange(90, 110) * MICROSECOND
                with perf.device_section(name):
                    device.spin(duration_ns)
                planted[-1].setdefault(name, []).append(duration_ns)
            device.advance(1000 * MICROSECOND)
            capture = "--captures" in options and rank == 1 and (step + 1) % MERGE_STEPS == 0
            if capture:
                torch_device.current_stream = device.new_stream()
                device.begin_capture(torch_device.current_stream)
            recording.watch.step()
            if capture:
                device.end_capture(torch_device.current_stream)
                torch_device.current_stream = 0
        waited = device.synchronizations - synchronizations
    statistics = DeviceStatistics()
    statistics.add(records_of(recording), recording.interned)
    merged = {name: len(recording.of(Kind.MERGED, name)) for name in order}
    told = {
        "rank": rank, "planted": planted, "windows": merged, "last": statistics.merged, "waited": waited,
        "notes": recording.notes,
        "own": {name: sketch.count for name, sketch in statistics.stamped.items()},
    }  # fmt: skip
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


main()
