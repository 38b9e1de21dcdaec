"""One rank of the job of side_by_side.py: a small DDP job over gloo whose rank 1 is slow.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m benchmarks.side_by_side_training
    TOOL OUT STEPS

Each tool is used as its own documentation shows. After the loop, while the tool still records, the
process writes its resources to OUT/rankN.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH = 256, 32
SLOW_RANK, SLOW_MS, SLOW_FROM_STEP = 1, 8.0, 200


class Block(nn.Module):
    """Two layers with a residual, and `extra_ms` of additional Python work in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.extra_ms = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        look_up_twice(self.extra_ms)
        return x + self.inner(x)


def look_up_twice(ms: float) -> None:
    """Spend time as the planted fault: a named function that a Python profiler can show."""
    end_s = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end_s:
        sum(range(500))


def no_step(model: nn.Module) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def log_nothing(step: int, loss: float, step_s: float) -> None:
    pass


def train(
    rank: int,
    steps: int,
    around: Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]],
    around_step: Callable[[nn.Module], AbstractContextManager[Any]] = no_step,
    log: Callable[[int, float, float], None] = log_nothing,
    out: Path | None = None,
) -> None:
    """Run the loop. The fault begins at SLOW_FROM_STEP.

    The context `around` covers the whole loop, and `around_step` each step. `log` is called after
    each step.
    """
    torch.manual_seed(0)
    middle = Block()
    model = nn.Sequential(
        OrderedDict(first=Block(), middle=middle, last=Block(), head=nn.Linear(WIDTH, 8))
    )
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    data = DataLoader(TensorDataset(torch.randn(BATCH * steps, WIDTH)), batch_size=BATCH)
    seconds = []
    with around(parallel, optimizer):
        begin_s = last_s = time.perf_counter()
        for step, (batch,) in enumerate(data):
            middle.extra_ms = SLOW_MS if rank == SLOW_RANK and step >= SLOW_FROM_STEP else 0.0
            with around_step(parallel):
                loss = parallel(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            now_s = time.perf_counter()
            log(step, loss.item(), now_s - last_s)
            seconds.append(now_s - last_s)
            last_s = now_s
        if out is not None:
            (out / f"rank{rank}.json").write_text(
                json.dumps({**held(), **paces(seconds, last_s - begin_s)})
            )


def held() -> dict[str, Any]:
    """Return the numbers of this process's threads, open sockets, and loaded Python modules."""
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(each))
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "sockets": sum(link.startswith("socket:") for link in links),
        "modules": len(sys.modules),
        "ended_s": time.time(),
    }


def paces(seconds: list[float], loop_s: float) -> dict[str, float]:
    """Return the loop's duration, and the median step while rank 1 is slow."""
    return {"loop_s": loop_s, "step_p50_s": statistics.median(seconds[len(seconds) // 2 :])}


def alone(rank: int, steps: int, out: Path) -> None:
    train(rank, steps, lambda model, optimizer: contextlib.nullcontext(), out=out)


def under_torchlens_perf(rank: int, steps: int, out: Path) -> None:
    import torchlens_perf as perf

    train(
        rank,
        steps,
        lambda model, optimizer: perf.watch(model, optimizer, dir=str(out / "runs")),
        out=out,
    )


def under_traceml(rank: int, steps: int, out: Path) -> None:
    import traceml_ai as traceml

    traceml.init(mode="auto")
    train(
        rank, steps, lambda model, optimizer: contextlib.nullcontext(), traceml.trace_step, out=out
    )


def under_memray(rank: int, steps: int, out: Path) -> None:
    import memray

    train(rank, steps, lambda model, optimizer: memray.Tracker(out / f"rank{rank}.bin"), out=out)


def under_pyinstrument(rank: int, steps: int, out: Path) -> None:
    from pyinstrument import Profiler

    profiler = Profiler()
    train(rank, steps, lambda model, optimizer: profiler, out=out)
    profiler.write_html(out / f"rank{rank}.html")


def under_wandb(rank: int, steps: int, out: Path) -> None:
    """Log step times to a wandb run per rank, with all runs in one group, as wandb's documentation
    recommends.
    """
    import wandb

    @contextlib.contextmanager
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        with wandb.init(
            project="side-by-side", group="job", name=f"rank-{rank}", mode="offline", dir=out
        ):
            yield

    def log(step: int, loss: float, step_s: float) -> None:
        wandb.log({"loss": loss, "step_ms": 1e3 * step_s})

    train(rank, steps, run, log=log, out=out)


UNDER = {
    "none": alone,
    "torchlens_perf": under_torchlens_perf,
    "traceml": under_traceml,
    "memray": under_memray,
    "pyinstrument": under_pyinstrument,
    "wandb": under_wandb,
    "dask": alone,  # side_by_side_dask.py calls this function on its workers
}


def main(tool: str, out: Path, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    UNDER[tool](dist.get_rank(), steps, out)
    # gloo's threads may still be finishing the last collective. Destroying the group now would
    # abort the process.
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
