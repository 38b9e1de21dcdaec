"""One process of a job under a tool: makes blocks of work when the benchmark asks for them.

    python -m benchmarks.peers_worker TOOL WORK OUT

Lines of stdin: `block N` makes N units of work, `end` stops the tool. Each answer is a line of JSON
in the file descriptor PEER_ANSWERS.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpt import GPT
from benchmarks.measure import UNROLLED, per_operation_ns
from benchmarks.peers_tools import TOOLS, Tool


def make_step(tool: Tool, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    ids, targets = torch.randint(0, 256, (1, 8)), torch.randint(0, 256, (8,))

    def step() -> None:
        with tool.step(model):
            with tool.phase("forward"):
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets)
            with tool.phase("backward"):
                loss.backward()
            with tool.phase("optimizer"):
                optimizer.step()
            optimizer.zero_grad()

    return step


def make_all_reduce(tool: Tool) -> Callable[[], None]:
    """Return a function that reduces 4 KB."""
    tensor = torch.ones(1024)

    def call() -> None:
        with tool.phase("all_reduce"):
            dist.all_reduce(tensor)

    return call


def resident_bytes() -> int:
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmRSS:"))
    return 1024 * int(line.split()[1])


def main(name: str, work: str, out: Path) -> None:
    answers = os.fdopen(int(os.environ["PEER_ANSWERS"]), "w", buffering=1)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")

    torch.manual_seed(0)
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        store = dist.FileStore(os.environ["PEER_STORE"], ranks)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=ranks)
    model: nn.Module = GPT()
    if work == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    # The first step imports parts of torch, which is no cost of a tool.
    make_step(Tool(False), model, optimizer)()
    tool = TOOLS[name][0](work == "modules")
    begin_s = time.perf_counter()
    tool.load()
    loaded_s = time.perf_counter()
    tool.begin(out, model, optimizer)
    started_s = time.perf_counter()
    if tool.every_module:
        tool.mark_modules(model)
    unit = make_all_reduce(tool) if work == "all_reduce" else make_step(tool, model, optimizer)
    unit()
    versions = {each: importlib.metadata.version(each) for each in tool.packages}
    answer(import_s=loaded_s - begin_s, start_s=started_s - loaded_s, versions=versions)
    for line in sys.stdin:
        word, *count = line.split()
        if word == "end":
            break
        units = int(count[0])
        if work == "section":
            timed = per_operation_ns(
                'with section("a"): pass', {"section": tool.section}, max(1, units // UNROLLED)
            )
            answer(ns=timed())
            continue
        unit()
        begin_ns = time.perf_counter_ns()
        for _ in range(units):
            unit()
        answer(ns=(time.perf_counter_ns() - begin_ns) / units)
    answer(resident_bytes=resident_bytes())
    sys.stdin.readline()
    tool.end()
    if ranks > 1:
        # gloo aborts if its threads are still finishing the last collective.
        dist.barrier()
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
