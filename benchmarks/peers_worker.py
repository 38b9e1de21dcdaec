"""One process of a job under a tool: makes blocks of work when the benchmark asks for them.

    python -m benchmarks.peers_worker TOOL MODEL OUT [all] [forks=N]

MODEL is gpt, ddp (gpt in DistributedDataParallel), short (one layer) or chain:N (N small modules).
`all`: every module is marked. forks=N: the process forks N ranks.

Lines of stdin: `begin` imports and starts the tool, `block WORK N [PERIOD_MS]` makes N units of
work, `end` stops to train, `exit` stops the tool. Each answer is a line of JSON in the file
descriptor PEER_ANSWERS.
"""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpt import GPT
from benchmarks.measure import UNROLLED, per_operation_ns
from benchmarks.peers_tools import TOOLS, Tool


def make_model(name: str) -> nn.Module:
    kind, _, count = name.partition(":")
    if kind == "chain":
        return nn.Sequential(nn.Linear(8, 8), *(nn.ReLU() for _ in range(int(count))))
    if kind == "short":
        return nn.Sequential(nn.Linear(8, 8))
    return nn.parallel.DistributedDataParallel(GPT()) if kind == "ddp" else GPT()


def make_step(tool: Tool, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    ids, targets = torch.randint(0, 256, (1, 8)), torch.randint(0, 256, (8,))
    is_gpt = not isinstance(model, nn.Sequential)
    inputs = ids if is_gpt else torch.ones(1, 8)

    def step() -> None:
        with tool.step(model):
            with tool.phase("forward"):
                result = model(inputs)
                loss = (
                    nn.functional.cross_entropy(result.flatten(0, 1), targets)
                    if is_gpt
                    else result.sum()
                )
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


class Worker:
    """A rank that trains under a tool."""

    def __init__(self, name: str, model: str, out: Path, *, every_module: bool) -> None:
        self._tool = TOOLS[name][0](every_module)
        self._out = out
        self._model = make_model(model)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        # The first step imports parts of torch, which is no cost of a tool.
        make_step(Tool(False), self._model, self._optimizer)()
        # The processor time of a process does not grow while other processes use the CPU.
        processor = os.environ["PEER_CLOCK"] == "processor" and not dist.is_initialized()
        self._now_ns = time.process_time_ns if processor else time.perf_counter_ns

    def begin(self) -> dict[str, Any]:
        tool = self._tool
        begin_s = time.perf_counter()
        tool.load()
        loaded_s = time.perf_counter()
        tool.begin(self._out, self._model, self._optimizer)
        if tool.every_module:
            tool.mark_modules(self._model)
        started_s = time.perf_counter()
        self._units = {"step": make_step(tool, self._model, self._optimizer)}
        if dist.is_initialized():
            self._units["all_reduce"] = make_all_reduce(tool)
        for unit in self._units.values():
            unit()
        return {
            "import_s": loaded_s - begin_s,
            "start_s": started_s - loaded_s,
            "versions": {each: importlib.metadata.version(each) for each in tool.packages},
        }

    def block(self, work: str, count: int, period_s: float) -> dict[str, Any]:
        """Return the ns of a unit of work, after one unit that is not timed."""
        if work == "section":
            rounds = max(1, count // UNROLLED)
            names = {"section": self._tool.section}
            timed = per_operation_ns('with section("a"): pass', names, rounds)
            timed()
            return {"ns": timed()}
        unit = self._units[work]
        unit()
        begin_ns = self._now_ns()
        for _ in range(count):
            unit()
            if period_s:
                time.sleep(period_s)
        return {"ns": (self._now_ns() - begin_ns) / count}

    def serve(self, lines: TextIO, answers: TextIO) -> None:
        """Answer each line until the tool has been stopped."""
        for line in lines:
            word, *rest = line.split()
            if word == "exit":
                break
            found: dict[str, Any] = {"pid": os.getpid()}
            if word == "begin":
                found |= self.begin()
            elif word == "block":
                found |= self.block(rest[0], int(rest[1]), float(*rest[2:] or "0") / 1e3)
            found["resident_bytes"] = resident_bytes()
            answers.write(json.dumps([found]) + "\n")
            answers.flush()
        self._tool.end()


def serve_by_forks(worker: Worker, ranks: int, answers: TextIO) -> None:
    """Fork the ranks before the tool is imported. Pass each line on to all of them."""
    pipes: list[tuple[TextIO, TextIO, int]] = []
    gc.freeze()
    for rank in range(ranks):
        (their_lines, lines), (read, write) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            for ours, theirs, _ in pipes:
                ours.close()
                theirs.close()
            os.close(lines)
            os.close(read)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            worker.serve(os.fdopen(their_lines), os.fdopen(write, "w"))
            # The end of the interpreter would copy the memory of the parent: seconds for each rank.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            os._exit(0)
        os.close(their_lines)
        os.close(write)
        pipes.append((os.fdopen(lines, "w"), os.fdopen(read), pid))
    for line in sys.stdin:
        for lines_of_rank, _, _ in pipes:
            lines_of_rank.write(line)
            lines_of_rank.flush()
        if line.split() == ["exit"]:
            break
        found = [each for _, reads, _ in pipes for each in json.loads(reads.readline() or "[]")]
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    failed = [pid for _, _, pid in pipes if os.waitpid(pid, 0)[1]]
    if failed:
        sys.exit(f"{len(failed)} of {ranks} ranks failed")


def main(name: str, model: str, out: Path, options: list[str]) -> None:
    answers = os.fdopen(int(os.environ["PEER_ANSWERS"]), "w")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        store = dist.FileStore(os.environ["PEER_STORE"], ranks)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=ranks)
    worker = Worker(name, model, out, every_module="all" in options)
    answers.write(json.dumps([{"resident_bytes": resident_bytes()}]) + "\n")
    answers.flush()
    forks = [int(each.removeprefix("forks=")) for each in options if each.startswith("forks=")]
    if forks:
        serve_by_forks(worker, forks[0], answers)
        return
    worker.serve(sys.stdin, answers)
    if ranks > 1:
        # gloo aborts if its threads are still finishing the last collective.
        dist.barrier()
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
