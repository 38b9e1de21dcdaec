"""Record the ten small training runs in tests/golden/recorded/ for
tests/golden/test_recorded_runs.py.

Run it by hand, and only for a reason, because every verdict on these runs is stored in a golden
file. It needs an idle machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchlens_perf as perf

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "recorded"
STEPS, WIDTH, BATCH = 128, 256, 64
LONG_S, SHORT_S = 0.012, 0.006
TWO_RANKS = (
    "clean",
    "slow_forward",
    "slow_backward_for_a_while",
    "slow_data",
    "one_stall",
    "saves_alone",
)
ONE_RANK = ("evaluates_and_saves", "waits_for_data", "host_code", "sections_and_two_optimizers")


class Samples(Dataset[torch.Tensor]):
    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.delay_s and index % BATCH == 0:
            time.sleep(self.delay_s)
        return torch.full((WIDTH,), index % 7 / 7)


class Block(nn.Module):
    def __init__(self, delay: Callable[[str], None]) -> None:
        super().__init__()
        self.linear, self.delay = nn.Linear(WIDTH, WIDTH), delay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.delay("forward")
        y = torch.relu(self.linear(x))
        if y.requires_grad:
            y.register_hook(lambda _: self.delay("backward"))
        return y


def train(name: str, rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = 0

    def delay(phase: str) -> None:
        slow = {
            "slow_forward": phase == "forward" and step >= 40,
            "slow_backward_for_a_while": phase == "backward" and 30 <= step < 80,
            "one_stall": phase == "forward" and step == 70,
        }.get(name, False)
        if slow and rank == 1:
            time.sleep(0.4 if name == "one_stall" else LONG_S)

    model: nn.Module = nn.Sequential(Block(lambda _: None), Block(delay), nn.Linear(WIDTH, 10))
    trained = DistributedDataParallel(model) if ranks > 1 else model
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-3)]
    if name == "sections_and_two_optimizers":
        other = nn.Linear(WIDTH, 1)
        optimizers.append(torch.optim.SGD(other.parameters(), 1e-3))
    slow_data = (name == "slow_data" and rank == 0) or name == "waits_for_data"
    loader = DataLoader(Samples(LONG_S if slow_data else 0.0), BATCH)
    with perf.watch(trained, dir=folder, report="off"):
        for step, x in enumerate(loader):
            optimizers[0].zero_grad()
            trained(x).square().mean().backward()
            optimizers[0].step()
            if len(optimizers) > 1:
                with perf.section("augment"):
                    time.sleep(LONG_S)
                if step % 2:
                    other(x).mean().backward()
                    optimizers[1].step()
            if name == "host_code":
                time.sleep(SHORT_S)
            if name == "evaluates_and_saves" and step % 30 == 29:
                trained.eval()
                with torch.no_grad():
                    for _ in range(40):
                        trained(x)
                trained.train()
            if name in ("evaluates_and_saves", "saves_alone") and step % 40 == 39 and rank == 0:
                torch.save(model.state_dict(), Path(folder) / "model.pt")
                time.sleep(0.05 if name == "saves_alone" else 0.0)


def record(name: str, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        port = str(29600 + os.getpid() % 300)
        ended = [
            subprocess.Popen(
                [sys.executable, __file__, name, folder],
                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHLENS_PERF_RUN_ID": name},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        if any(process.wait() for process in ended):
            raise SystemExit(f"{name} failed")
        spans, deadline_s = Path(folder) / name / "spans", time.monotonic() + 60
        nodes = Path(folder) / name / "nodes"
        while '"ended":""' in "".join(
            each.read_text() for each in nodes.glob("*.json")
        ) or not list(spans.glob("*")):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the records of {name} were not written")
            time.sleep(0.5)
        time.sleep(2)
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        shutil.copytree(spans, FOLDER / name / "spans")


def main() -> None:
    if "RANK" in os.environ:
        name, folder = sys.argv[1:]
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if ranks > 1:
            dist.init_process_group("gloo")
        train(name, rank, ranks, folder)
        if ranks > 1:
            dist.destroy_process_group()
        return
    for name in sys.argv[1:] or (*TWO_RANKS, *ONE_RANK):
        record(name, 2 if name in TWO_RANKS else 1)
        print(
            name, sum(file.stat().st_size for file in (FOLDER / name).rglob("*.parquet")), "bytes"
        )


if __name__ == "__main__":
    main()
