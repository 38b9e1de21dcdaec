"""One process of a job with roles: the trainer, an engine or a tool.

usage: role_on_node.py ROLE ITERATIONS

They talk over sockets in the working directory, which need no network. The trainer sends each sample to the
engine and then to the tool, and ends both.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torchlens_perf as perf

SAMPLES, GENERATION_S, TOOL_S = 3, 0.05, 0.02
_EVENTS = {"rollout": ("generation", GENERATION_S), "tool": ("tool", TOOL_S)}


def serve(role: str) -> None:
    stage, seconds = _EVENTS[role]
    with Listener(role, "AF_UNIX") as listener, listener.accept() as caller:
        while (sample := caller.recv()) is not None:
            perf.event(f"{stage}_begin", id=sample)
            time.sleep(seconds)
            tokens = 10 if stage == "generation" else -1
            perf.event(f"{stage}_end", id=sample, tokens_out=tokens)
            caller.send(sample)


def call(role: str) -> Connection:
    while True:
        try:
            return Client(role, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.02)


def wait_for_readers(run: Path) -> None:
    """Wait until the events of both other nodes are read, as in a job that is longer than a second."""
    until_s = time.monotonic() + 60
    for node in ("node-b", "node-c"):
        while not list(run.glob(f"events/{node}-*.until")) and time.monotonic() < until_s:
            time.sleep(0.02)


def train(iterations: int) -> None:
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        call("rollout") as engine,
        call("tool") as tool,
        perf.watch(model, optimizer) as watch,
    ):
        for batch in range(iterations):
            if batch == 1:
                wait_for_readers(Path(watch.run_dir))
            for sample in (f"{batch}-{index}" for index in range(SAMPLES)):
                perf.event("sample_sent", id=sample, batch=batch)
                for server in (engine, tool):
                    server.send(sample)
                    server.recv()
            perf.event("batch_complete", batch=batch)
            perf.event("steps_begin", batch=batch)
            for _ in range(3):
                model(torch.ones(4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            perf.event("steps_end", batch=batch)
        for server in (engine, tool):
            server.send(None)


if __name__ == "__main__":
    _, role, iterations = sys.argv
    if role == "trainer":
        train(int(iterations))
    else:
        serve(role)
