"""A rank whose device sections are merged with those of other ranks.

    usage: merging_rank.py DRIVER KERNELS FOLDER [OPTION]

- --other-order: rank 1 enters its sections in another order.
- --unable: rank 1 cannot merge, because CuPy is missing there.
- --off: rank 1 does not record.
- --evaluates: rank 0 makes five forward passes before it trains.
- --captures: rank 1 captures a graph when a window is due, the last time at the run's last step.
- --broken-steps: the parts of rank 1's steps cannot be reduced.

Writes JSON into FOLDER: the planted durations of sections and device steps in each window, the
merged values in the recording, and the number of waits for the device.
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
from torchlens_perf.cuda.section_stamper import MERGE_STEPS, DeviceSectionHook
from torchlens_perf.cuda.steps import PendingSteps
from torchlens_perf.run.device.merged_rows import unpack_row
from torchlens_perf.run.device.step_parts import compute_part_durations_ns
from torchlens_perf.run.ring import Flag, Kind

MICROSECOND, SLOW = 1000, 2
WINDOWS = 3


def device_step(forward_ns: int) -> list[int]:
    """Run a step that takes 5 ms more than its forward pass.

    In the additional time, the step waits for 2 ms and is idle for 1 ms.
    """
    phases = [(Kind.FORWARD, 0, forward_ns), (Kind.BACKWARD, forward_ns, 4_000_000)]
    stall = (Kind.WAIT, forward_ns + 1_500_000, 2_000_000)
    return compute_part_durations_ns(
        [(int(kind), start, duration) for kind, start, duration in (*phases, stall)],
        forward_ns + 5_000_000,
    )


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
    known = PendingSteps()
    forward_ns: list[list[int]] = []
    with recorded(Path(folder) / str(rank)) as recording:
        session = recording.watch._session
        if "--off" in options and rank == 1:
            torch_device.all_ranks_agree(torch_device.create_process_group(), able=False)
        else:
            session.attach(
                [DeviceSectionHook(torch_device, torch_device.now_ns, aggregate=True, known=known)]
            )
        if "--evaluates" in options and rank == 0:
            for _ in range(5):
                # Forward passes of a model end steps like this one until training begins.
                session.step.end(int(Flag.INFERENCE))
        synchronizations = device.synchronizations
        for step in range(WINDOWS * MERGE_STEPS):
            if step % MERGE_STEPS == 0:
                planted.append({})
                forward_ns.append([])
            for name in order:
                slow = 2 if rank == SLOW and name == "mlp" else 1
                duration_ns = slow * draw.randrange(90, 110) * MICROSECOND
                with perf.device_section(name):
                    device.spin(duration_ns)
                planted[-1].setdefault(name, []).append(duration_ns)
            forward_ns[-1].append(
                (12 if rank == SLOW else 8) * draw.randrange(990, 1010) * MICROSECOND
            )
            known.add_step(
                [1, 2]
                if "--broken-steps" in options and rank == 1
                else device_step(forward_ns[-1][-1])
            )
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
    statistics.add_records(records_of(recording), recording.interned)
    merged = {name: len(recording.of(Kind.MERGED, name)) for name in order}
    rows = [
        unpack_row(each, recording.interned)
        for each in records_of(recording)
        if each["kind"] == Kind.MERGED
    ]
    told = {
        "forward": forward_ns, "rows": [each._asdict() for each in rows if each.row >= 0],
        "rank": rank, "planted": planted, "windows": merged, "last": statistics.merged, "waited": waited,
        "notes": recording.notes,
        "own": {name: sketch.count for name, sketch in statistics.stamped.items()},
    }  # fmt: skip
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


main()
