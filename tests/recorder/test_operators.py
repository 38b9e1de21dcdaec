"""Operations counted by the native tap: equality with torch's counter, passes, modules, harm."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import flop_counter

from tests.support.counted_models import MODELS, Decoder, Step, training
from tests.support.long import long
from tests.support.ranks import Rank, make_run
from tests.support.recording import EVERYTHING, recorded
from torchlens_perf.hooks import operators
from torchlens_perf.hooks.collectives import python_tap
from torchlens_perf.recorder import native_tap, recorder
from torchlens_perf.run.operators import OperatorKey, Pass, Work
from torchlens_perf.run.ring import Kind

_TAP = native_tap.load_tap()
pytestmark = pytest.mark.skipif(
    _TAP is None, reason="the native tap is not built: torchlens-perf build-tap builds it"
)
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.sdpa_flop_count,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        flop_counter.sdpa_backward_flop_count
    ),
}


def _with_shapes(formula: Callable[..., int], count: int) -> Callable[..., int]:
    """Adapt a formula to an operator that has more arguments."""

    def of_operator(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
        return formula(*shapes[:count])

    return of_operator


_FORMULAS: dict[Any, Any] = {
    operator: _with_shapes(formula, count)
    for (operator, formula), count in zip(_CPU_ATTENTION.items(), (3, 4), strict=True)
}


def by_torch(step: Step) -> flop_counter.FlopCounterMode:
    """Count a step with torch, with a formula for the attention on CPUs that torch lacks."""
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    with counter:
        step()
    return counter


def by_tap(step: Step) -> list[tuple[Any, ...]]:
    """Count a step with the tap, outside a watch. Return the rows of stop_counting()."""
    assert _TAP is not None
    _TAP.attach(recorder.collective_marks(), [], [], lambda *_: None)
    _TAP.start_counting()
    try:
        step()
    finally:
        *_, rows, _others = _TAP.stop_counting()
    return rows


def flops_by_pass(rows: list[tuple[Any, ...]]) -> Counter[Pass]:
    sums: Counter[Pass] = Counter()
    for _, in_pass, _, _, flops, *_ in rows:
        sums[Pass(in_pass)] += flops
    return sums


# -- equality with torch


@pytest.mark.parametrize("name", MODELS)
def test_operations_equal_those_of_torchs_counter(name: str) -> None:
    torch.manual_seed(1)
    step = MODELS[name]()
    step()  # Gradients exist from here on.

    expected = by_torch(step).get_total_flops()

    assert expected > 0
    assert flops_by_pass(by_tap(step)).total() == expected


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", *long("inductor")])
def test_compiled_model_counts_the_same_and_is_not_compiled_again(backend: str) -> None:
    torch.manual_seed(1)
    torch._dynamo.reset()
    model, tokens = Decoder(), torch.randint(0, 50, (3, 20))
    expected = by_torch(training(model, tokens)).get_total_flops()
    compiled = torch.compile(model, backend=backend)
    training(compiled, tokens)()
    before = dict(torch._dynamo.utils.counters["stats"])

    counted = flops_by_pass(by_tap(training(compiled, tokens)))

    assert counted.total() == expected
    assert dict(torch._dynamo.utils.counters["stats"]) == before


def test_gradient_of_a_grouped_convolutions_weight_is_counted_once() -> None:
    """torch counts it once for each group."""
    weight = torch.randn(8, 1, 3, 3, requires_grad=True)
    image = torch.randn(2, 8, 6, 6)

    def step() -> None:
        nn.functional.conv2d(image, weight, groups=8).sum().backward()

    forward = 2 * 2 * 8 * 9 * 16
    assert flops_by_pass(by_tap(step)) == {Pass.FORWARD: forward, Pass.BACKWARD: forward}
    assert by_torch(step).get_total_flops() == forward + 8 * forward


@pytest.mark.parametrize(
    ("whole", "cell", "gates"), [(nn.LSTM, nn.LSTMCell, 4), (nn.GRU, nn.GRUCell, 3)]
)
def test_recurrent_layer_counts_the_products_of_its_cells(
    whole: type[nn.Module], cell: type[nn.Module], gates: int
) -> None:
    """The operator of LSTM on CPUs has no formula in torch."""
    model, x = whole(6, 5), torch.randn(7, 2, 6)
    counted = flops_by_pass(by_tap(lambda: model(x)[0].sum().backward()))

    assert counted[Pass.FORWARD] == 7 * 2 * 2 * gates * 5 * (6 + 5)
    single = cell(6, 5)
    assert 7 * by_torch(lambda: single(x[0])).get_total_flops() == counted[Pass.FORWARD]


def test_matrix_times_vector_counts_though_torch_has_no_formula() -> None:
    matrix, vector = torch.randn(4, 6), torch.randn(6)

    assert flops_by_pass(by_tap(lambda: matrix @ vector)) == {Pass.FORWARD: 2 * 4 * 6}


def test_grouped_products_count_the_tokens_of_each_expert() -> None:
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped products")
    tokens = torch.randn(16, 32, dtype=torch.bfloat16)
    experts = torch.randn(2, 32, 64, dtype=torch.bfloat16)
    ends = torch.tensor([4, 16], dtype=torch.int32)

    counted = by_tap(lambda: torch._grouped_mm(tokens, experts, ends))

    assert flops_by_pass(counted) == {Pass.FORWARD: 2 * 16 * 32 * 64}


# -- passes and precision


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_apart_from_the_models_operations(reentrant: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    x = torch.randn(8, 16, requires_grad=True)
    plain = flops_by_pass(by_tap(training(model, x)))

    def recomputing() -> None:
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).sum().backward()

    counted = flops_by_pass(by_tap(recomputing))

    # Without re-entrance, torch stops at the second product, whose result is not needed.
    assert counted.pop(Pass.RECOMPUTE) == plain[Pass.FORWARD] // (1 if reentrant else 2)
    assert counted == plain


def test_backward_pass_with_a_graph_is_not_recomputation() -> None:
    """Its operators run with gradients enabled, as recomputation does."""
    counted = flops_by_pass(by_tap(MODELS["penalty_on_gradients"]()))

    assert set(counted) == {Pass.FORWARD, Pass.BACKWARD}


def test_attention_counts_its_recomputed_scores_apart() -> None:
    query, key, value = (torch.randn(2, 4, 10, 8, requires_grad=True) for _ in range(3))

    def step() -> None:
        nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()

    product = 2 * 2 * 4 * 10 * 10 * 8
    assert flops_by_pass(by_tap(step)) == {
        Pass.FORWARD: 2 * product,
        Pass.BACKWARD: 4 * product,
        Pass.RECOMPUTE: product,
    }


@pytest.mark.parametrize(
    ("causal", "work"), [(True, Work.CAUSAL_ATTENTION), (False, Work.ATTENTION)]
)
def test_causal_attention_is_told_from_full_attention(causal: bool, work: Work) -> None:
    query = torch.randn(2, 4, 10, 8, requires_grad=True)

    rows = by_tap(
        lambda: nn.functional.scaled_dot_product_attention(
            query, query, query, is_causal=causal
        ).sum().backward()
    )  # fmt: skip

    assert {Work(row[2]) for row in rows} == {work}


def test_precision_is_that_in_which_a_product_runs_under_autocast() -> None:
    rows = by_tap(MODELS["gpt_in_bfloat16"]())

    assert {row[3] for row in rows} == {"BFloat16"}


def test_product_that_autocast_calls_again_counts_once() -> None:
    """The dispatcher calls mm with float32 operands, and autocast calls it again with bfloat16."""
    left, right = torch.randn(4, 8), torch.randn(8, 2)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            torch.mm(left, right)

    assert [(row[3], row[4]) for row in by_tap(step)] == [("BFloat16", 2 * 4 * 8 * 2)]


def test_shapes_without_data_do_not_count() -> None:
    left = torch.empty(4, 4, device="meta")

    assert by_tap(lambda: left @ left) == []


@pytest.mark.long
def test_shapes_seen_while_a_model_is_compiled_do_not_count() -> None:
    torch._dynamo.reset()
    model, x = nn.Linear(16, 16), torch.randn(4, 16)
    compiled = torch.compile(model)

    counted = flops_by_pass(by_tap(training(compiled, x)))

    assert counted == flops_by_pass(by_tap(training(model, x)))


# -- in a watch


def _operators(recording: Any) -> list[tuple[str, OperatorKey, int, int]]:
    return [
        (each.name.removeprefix("forward "), OperatorKey.from_flags(each.flags), each.value0, each.step)
        for each in recording.of(Kind.OPERATORS)
    ]  # fmt: skip


def test_operations_of_all_passes_belong_to_the_modules_of_the_forward_pass(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, tokens = Decoder(recomputes=True), torch.randint(0, 50, (3, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = training(model, tokens)
    expected = by_torch(step).get_flop_counts()
    with recorded(tmp_path, model, optimizer, **EVERYTHING) as recording:
        for _ in range(2):
            step()
            optimizer.step()
    sums: Counter[str] = Counter()
    for name, _, flops, at_step in _operators(recording):
        sums[name] += flops * (at_step == 0)

    leaves = {f"blocks.{block}.{part}" for block in (0, 1) for part in ("query", "up", "out")}
    for name in leaves | {"head"}:
        assert sums[name] == sum(expected[f"Decoder.{name}"].values()) > 0
    assert sums.total() == sum(expected["Global"].values())


def test_products_of_an_optimizer_are_no_model_operations(tmp_path: Path) -> None:
    class Orthogonal(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    each.sub_(each @ each.T @ each, alpha=1e-6)

    model = nn.Linear(8, 8, bias=False)
    optimizer = Orthogonal(model.parameters(), lr=1.0)
    with recorded(tmp_path, model, optimizer, **EVERYTHING) as recording:
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    found = {
        key.in_pass: flops for _, key, flops, step in _operators(recording) if step == 0 and flops
    }
    assert found == {
        Pass.FORWARD: 2 * 4 * 64,
        Pass.BACKWARD: 2 * 4 * 64,
        Pass.OPTIMIZER: 2 * 2 * 8**3,
    }


def test_unsampled_steps_are_not_counted(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with recorded(tmp_path, model, optimizer) as recording:
        for _ in range(12):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    assert {each.step for each in recording.of(Kind.OPERATORS)} == {8}
    assert recording.metadata["operators_missing"] == ""


def test_counted_steps_become_rare(tmp_path: Path) -> None:
    """Each is at least twice as late as the one before, up to a pause of 1024 steps."""
    rank = Rank(make_run(tmp_path), 0)
    counter, counted = operators._StepCounter(rank.session, _TAP), []
    for step in range(4000):
        counter.begin_step(step)
        rank.clock.advance(10_000_000)
        if counter._counting:
            counted.append(step)
        counter.end_step(0, are_tokens=False)
        rank.session.recorder.next_step(0, 0, 0)

    assert counted == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072]


def test_operators_without_a_formula_are_recorded_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Softplus())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with recorded(tmp_path, model, optimizer, **EVERYTHING) as recording:
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    others = {name: step for name, key, _, step in _operators(recording) if key.work == Work.OTHER}
    assert others.keys() & {"aten::softplus", "aten::softplus_backward"}
    assert "aten::addmm" not in others


def test_reason_is_published_where_operators_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(tmp_path, nn.Linear(2, 2), collectives=False) as recording:
        pass
    assert recording.metadata["operators_missing"] == "the setting collectives is off"
    monkeypatch.setattr(native_tap, "load_tap", lambda: None)
    with recorded(tmp_path / "other", nn.Linear(2, 2)) as recording:
        pass
    # Left in place, the Python tap would hide collectives from the native tap of later tests.
    python_tap._libraries.clear()
    assert "build-tap" in recording.metadata["operators_missing"]


# -- harm


def test_counting_keeps_no_tensor_and_changes_no_bit() -> None:
    torch.manual_seed(1)
    model, tokens = Decoder(), torch.randint(0, 50, (3, 20))
    training(model, tokens)()
    expected = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    gc.collect()
    before = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    by_tap(training(model, tokens))

    gc.collect()
    kept = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    assert kept <= before + len(expected)
    for each, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(each.grad, gradient)


def test_operators_on_other_threads_may_run_while_counting_starts_and_stops() -> None:
    """Threads run operators while the callbacks are enabled and disabled many times."""
    ended, errors = threading.Event(), []

    def compute() -> None:
        x = torch.randn(8, 8, requires_grad=True)
        try:
            while not ended.is_set():
                (x @ x).sum().backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    counted = [
        flops_by_pass(by_tap(lambda: torch.ones(2, 2) @ torch.ones(2, 2))) for _ in range(300)
    ]
    ended.set()
    for thread in threads:
        thread.join()

    assert not errors
    # Operations of other threads count too, in whole products.
    assert all(each.total() >= 16 for each in counted)
    assert all((each[Pass.FORWARD] - 16) % 1024 == 0 for each in counted)


def test_forked_child_does_not_count(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with recorded(tmp_path, model, optimizer, **EVERYTHING):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                x = torch.ones(8, 8)
                x @ x
                assert _TAP is not None
                status = len(_TAP.stop_counting()[2])
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
