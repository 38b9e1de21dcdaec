"""Tests that a watch does not affect torch.compile.

Frames, graphs and operations are equal, and nothing is recompiled.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

import torchlens_perf as perf
from tests.support.long import long
from tests.support.recording import EVERYTHING, Recording, recorded
from torchlens_perf.run.ring import Kind

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Captured(NamedTuple):
    """Counts and graphs of Dynamo in a run."""

    frames: int
    operations: int
    graphs: int
    breaks: int
    reasons: list[str]


Run = Callable[["Model", torch.optim.Optimizer, Any], None]


class Block(nn.Module):
    """A block that is no nn.Sequential, because Dynamo treats torch's own modules differently from
    a user's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Other(Model):
    """A copy of Model with separate code, so code compiled for Model is not reused."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](x)))


def capture(run: Run, folder: Path | None) -> tuple[Captured, Recording | None]:
    """Run with a counting backend, inside a watch if a folder is given."""
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    context: Any = (
        nullcontext() if folder is None else recorded(folder, model, optimizer, **EVERYTHING)
    )
    with context as recording:
        run(model, optimizer, counter)
    captured = Captured(
        counter.frame_count,
        counter.op_count,
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        [*counters["graph_break"], *counters["unimplemented"]],
    )
    return captured, recording


def batches() -> Iterator[Tensor]:
    for _ in range(STEPS):
        yield torch.randn(4, 8)


def loop(model: Model, optimizer: torch.optim.Optimizer, call: Callable[[Tensor], Tensor]) -> None:
    for batch in batches():
        call(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_model(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    loop(model, optimizer, torch.compile(model, backend=backend, fullgraph=True))


def with_hooks(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    """Run modules with hooks inside the graph.

    Dynamo traces calls of modules with hooks, as with DTensor's hooks.
    """
    model.blocks[0].register_forward_pre_hook(lambda module, arguments: (arguments[0] * 2,))
    model.head.register_forward_hook(lambda module, arguments, result: result + 1)
    whole_model(model, optimizer, backend)


def module_compile(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    model.compile(backend=backend, fullgraph=True)
    loop(model, optimizer, model)


def function_around(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    loop(model, optimizer, torch.compile(lambda x: model(x).cos(), backend=backend, fullgraph=True))


def function_with_break(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    """Call the model in a frame that Dynamo does not compile as a whole, so the model is compiled
    separately.
    """

    def call(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        y = model(x)
        torch._dynamo.graph_break()
        return y.cos()

    loop(model, optimizer, torch.compile(call, backend=backend))


def regional(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    model.blocks[0].compile(backend=backend, fullgraph=True)
    model.blocks[1] = torch.compile(model.blocks[1], backend=backend, fullgraph=True)
    loop(model, optimizer, model)


def new_shapes(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for size in (2, 3, 5, 7):
        compiled(torch.randn(size, 8)).sum().backward()
        optimizer.step()


def evaluation_between(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            compiled(x)
        return compiled(x)

    loop(model, optimizer, call)


def optimizer_step(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    step = torch.compile(optimizer.step, backend=backend)
    for batch in batches():
        model(batch).sum().backward()
        step()
        optimizer.zero_grad()


def training_step(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    @torch.compile(backend=backend)
    def step(batch: Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches():
        step(batch)


def gradient_of_input(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    @torch.compile(backend=backend)
    def slope(batch: Tensor) -> Tensor:
        return torch.autograd.grad(model(batch).sum(), batch)[0] * 2

    for batch in batches():
        slope(batch.requires_grad_())
        optimizer.step()


def traced_autograd(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    """Compile the backward pass as a part of the graph."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        gradient_of_input(model, optimizer, backend)


def loader_loop(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    @torch.compile(backend=backend)
    def epoch(loader: DataLoader) -> Tensor:
        total = torch.zeros(())
        for (batch,) in loader:
            total = total + model(batch).sum()
        return total

    for _ in range(STEPS):
        epoch(DataLoader(TensorDataset(torch.randn(8, 8)), 4)).backward()
        optimizer.step()


def compiled_autograd(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    for batch in batches():
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def scaler_update(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    @torch.compile(backend=backend)
    def step(batch: Tensor) -> None:
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for batch in batches():
        step(batch)


WAYS = (
    whole_model, with_hooks, module_compile, function_around, function_with_break, regional, new_shapes,
    evaluation_between, optimizer_step, training_step, gradient_of_input, traced_autograd, loader_loop,
    compiled_autograd, scaler_update,
)  # fmt: skip


USUAL = (
    whole_model, with_hooks, function_with_break, regional, new_shapes, training_step, traced_autograd,
)  # fmt: skip


@pytest.mark.parametrize("run", [*USUAL, *long(*(each for each in WAYS if each not in USUAL))])
def test_compiled_graphs_are_the_same_with_every_hook(run: Run, tmp_path: Path) -> None:
    """Frames, operations and breaks are the same, and every step is recorded."""
    expected, _ = capture(run, None)
    actual, recording = capture(run, tmp_path)

    assert recording is not None
    assert expected[:3] == actual[:3]
    assert actual.breaks <= expected.breaks
    # Dynamo stops at a replaced function as at one of torch's, without a failed try inside it.
    assert [
        reason for reason in actual.reasons if "Recorder" in reason or "memoryview" in reason
    ] == []
    assert len(recording.steps) == STEPS
    assert recording.unbalanced == 0


def test_watch_begins_and_ends_without_recompilation(tmp_path: Path) -> None:
    """Graphs from before and inside the watch are reused. Inside the watch they are timed."""
    counter = CompileCounter()
    before, inside = Model(), Other()
    compiled_before = torch.compile(before, backend=counter, fullgraph=True)
    compiled_inside = torch.compile(inside, backend=counter, fullgraph=True)
    batch = torch.randn(4, 8)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled_before(batch)
        models = {"Model": compiled_before, "Other": compiled_inside}
        with recorded(tmp_path, models, **EVERYTHING) as recording:
            for _ in range(2):
                compiled_before(batch)
                compiled_inside(batch)
        compiled_before(batch)
        compiled_inside(batch)
        with recorded(tmp_path, {"Model": before, "Other": inside}, **EVERYTHING) as again:
            compiled_before(batch)
            compiled_inside(batch)

    assert counter.frame_count == 2
    assert recording.names(Kind.FORWARD) == ["forward Model", "forward Other"] * 2
    assert again.names(Kind.FORWARD) == ["forward Model", "forward Other"]
    assert recording.of(Kind.MODULE) + again.of(Kind.MODULE) == []


def test_watch_of_modules_with_hooks_causes_no_recompilation(tmp_path: Path) -> None:
    """If a module inside the graph has hooks, Dynamo traces and guards its whole call."""
    counter = CompileCounter()
    model = Model()
    model.blocks[0].register_forward_pre_hook(lambda module, arguments: (arguments[0] * 2,))
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    batch = torch.randn(4, 8)
    for number in range(2):
        compiled(batch)
        with recorded(tmp_path / str(number), compiled, **EVERYTHING) as recording:
            compiled(batch)
        assert recording.names(Kind.FORWARD) == ["forward Model"]
    compiled(batch)

    assert counter.frame_count == 1


def test_compiled_block_in_an_eager_model_is_timed_as_a_whole(tmp_path: Path) -> None:
    """Modules inside the compiled block's graph have no spans."""
    model = Model()
    model.blocks[0].compile(backend="eager")
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        for batch in batches():
            model(batch).sum().backward()

    assert "blocks.0, blocks.1: compiled: no inner times" in recording.notes
    assert sorted(set(recording.names(Kind.MODULE))) == ["blocks.0", "blocks.1", "head"]
    assert len(recording.of(Kind.MODULE)) == 3 * STEPS
    assert len(recording.of(Kind.FORWARD, "forward Model")) == STEPS
    assert {each.depth for each in recording.of(Kind.MODULE)} == {2}


def test_section_inside_a_graph_makes_no_graph_break_and_has_no_times(tmp_path: Path) -> None:
    """A section around the call of the compiled function has times."""
    counter = CompileCounter()
    model = Model()

    @perf.section("decorated")
    def decorated(x: Tensor) -> Tensor:
        return x.sin()

    @torch.compile(backend=counter, fullgraph=True)
    def call(x: Tensor) -> Tensor:
        with perf.section("inside"):
            y = model(x)
            with perf.section("nested"):
                return decorated(y)

    with recorded(tmp_path, model) as recording:
        for batch in batches():
            with perf.section("around"):
                call(batch)

    assert (counter.frame_count, counter.op_count) == (1, 6)
    assert recording.names(Kind.SECTION) == ["around"] * STEPS


def test_code_with_sections_compiled_before_the_watch_runs_inside_it(tmp_path: Path) -> None:
    """Dynamo does not know the section when it compiles the code."""
    model = Model()

    @torch.compile(backend="eager")
    def call(x: Tensor) -> Tensor:
        with perf.section("inside"):
            return model(x)

    batch = torch.randn(4, 8)
    expected = call(batch)
    with recorded(tmp_path, model) as recording:
        actual = call(batch)

    assert torch.equal(expected, actual)
    assert len(recording.steps) <= 1


@pytest.mark.long
@pytest.mark.parametrize("watching", ["without a watch", "first call inside a watch"])
@pytest.mark.xfail(
    reason="Dynamo is told of sections by a watch, and only once it has been imported"
)
def test_library_with_sections_compiles_to_the_same_graphs_as_without(
    watching: str, tmp_path: Path
) -> None:
    """A watch makes no difference."""
    program = f"""
import contextlib, torch, torchlens_perf as perf

def call(x):
    with perf.section("inside"):
        return x.sin()

watch = perf.watch(torch.nn.Linear(1, 1), dir={str(tmp_path)!r}, sidecar=False, report="off")
with watch if {watching != "without a watch"} else contextlib.nullcontext():
    torch.compile(call, backend="eager", fullgraph=True)(torch.ones(3))
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not_strict"])
def test_graph_of_torch_export_is_unchanged(strict: bool, tmp_path: Path) -> None:
    model, batch = Model(), torch.randn(4, 8)
    expected = torch.export.export(model, (batch,), strict=strict)
    with recorded(tmp_path, model, **EVERYTHING):
        model(batch).sum().backward()
        actual = torch.export.export(model, (batch,), strict=strict)

    assert str(expected.graph) == str(actual.graph)
    assert expected.graph_signature == actual.graph_signature
    stacks = [
        [node.meta.get("nn_module_stack") for node in program.graph.nodes]
        for program in (expected, actual)
    ]
    assert stacks[0] == stacks[1]


def test_result_of_dynamo_explain_is_unchanged(tmp_path: Path) -> None:
    """torch._dynamo.explain returns the same graphs, breaks and reasons."""
    model, batch = Model(), torch.randn(4, 8)

    def call(x: Tensor) -> Tensor:
        y = model(x)
        print(end="")
        return model(y).relu()

    expected = torch._dynamo.explain(call)(batch)
    torch._dynamo.reset()
    with recorded(tmp_path, model, **EVERYTHING):
        actual = torch._dynamo.explain(call)(batch)

    assert (expected.graph_count, expected.op_count) == (actual.graph_count, actual.op_count)
    assert [each.reason for each in expected.break_reasons] == [
        each.reason for each in actual.break_reasons
    ]


def test_dynamo_never_compiles_functions_of_this_package(tmp_path: Path) -> None:
    """Dynamo reaches such a function after a graph break.

    The second watch does not look at the functions again.
    """
    from torch._dynamo import convert_frame

    for number in range(2):
        torch._dynamo.reset()
        capture(training_step, tmp_path / str(number))
        seen = [code().co_filename for code in convert_frame.input_codes.seen if code() is not None]

        assert seen
        assert [name for name in seen if "/torchlens_perf/" in name] == []


def step_of_two_optimizers(model: Model, optimizer: torch.optim.Optimizer, backend: Any) -> None:
    other = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend=backend)
    def step() -> None:
        optimizer.step()
        other.step()

    for batch in batches():
        model(batch).sum().backward()
        step()


@pytest.mark.parametrize("run", [training_step, *long(optimizer_step, step_of_two_optimizers)])
def test_dynamo_translates_no_function_that_a_hook_calls(run: Run, tmp_path: Path) -> None:
    """The watch costs as many frames as two empty hooks of the user that Dynamo may not trace."""
    from torch.optim import optimizer

    def count_frames(folder: Path | None) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        capture(run, folder)
        return int(torch._dynamo.utils.counters["frames"]["total"])

    empty = torch._dynamo.disable(lambda *_: None)
    hooks = [
        register(empty)
        for register in (
            optimizer.register_optimizer_step_pre_hook,
            optimizer.register_optimizer_step_post_hook,
        )
    ]
    try:
        # The first compilation of a process also translates functions that torch calls once.
        count_frames(None)
        expected = count_frames(None)
    finally:
        for hook in hooks:
            hook.remove()

    assert count_frames(tmp_path) == expected
