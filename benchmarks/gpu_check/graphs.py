"""Check that a section in a captured graph is timed at every replay, for every way to capture."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
from torch import nn

import torchlens_perf as perf
from benchmarks.gpu_check.gpt import trainer
from benchmarks.gpu_check.lines import Checks
from benchmarks.gpu_check.runs import last_rings, stamped

REPLAYS = 40


def graphs(checks: Checks) -> None:
    """Check torch.cuda.graph, make_graphed_callables, and torch.compile with reduce-overhead."""
    for name, run in (
        ("torch.cuda.graph around a GPT's step", _captured_step),
        ("make_graphed_callables", _graphed_callable),
        ("torch.compile(mode='reduce-overhead')", _compiled),
    ):
        with tempfile.TemporaryDirectory() as folder:
            warm_up = run(folder)
            found = stamped(last_rings(folder))
        judge_counts(checks, name, {key: sketch.count for key, sketch in found.items()}, warm_up)


def judge_counts(checks: Checks, name: str, counts: dict[str, int], warm_up: int) -> None:
    """Expect a time of every replay, and of the runs before the capture."""
    value = ", ".join(f"{section}: {count}" for section, count in counts.items()) or "none"
    wanted = f"{REPLAYS} replays and {warm_up} before"
    checks.bar("graphs", name, value, wanted, counts == {"region": REPLAYS + warm_up})


def _watched(folder: str) -> perf.Watch:
    # Create the section before the watch, as a decorator does, because the first step captures.
    perf.device_section("region")
    return perf.watch(dir=folder, sidecar=False, report="off", modules="none")


def _replay(watch: perf.Watch, replay: Callable[[], object]) -> None:
    for _ in range(REPLAYS):
        replay()
        watch.step()
    torch.cuda.synchronize()


def _captured_step(folder: str) -> int:
    """Return how often the section ran before the replays."""
    _, step = trainer(batch=4, capturable=True)
    aside = torch.cuda.Stream()
    with _watched(folder) as watch:

        def region() -> None:
            with perf.device_section("region"):
                step()

        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                region()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            region()
        _replay(watch, graph.replay)
    return 3


class _Region(nn.Module):
    """A module whose forward pass is the section."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with perf.device_section("region"):
            return self.layers(x)


def _graphed_callable(folder: str) -> int:
    model, x = _Region().cuda(), torch.randn(64, 256, device="cuda", requires_grad=True)
    with _watched(folder) as watch:
        graphed = torch.cuda.make_graphed_callables(model, (x,), num_warmup_iters=3)
        _replay(watch, lambda: graphed(x))
    return 3


def _compiled(folder: str) -> int:
    """Use a section around the call, because sections inside compiled code are not timed."""
    layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda()
    compiled, x = torch.compile(layers, mode="reduce-overhead"), torch.randn(64, 256, device="cuda")
    with _watched(folder) as watch, torch.no_grad():

        def region() -> None:
            with perf.device_section("region"):
                compiled(x)

        for _ in range(4):
            region()
        _replay(watch, region)
    return 4
