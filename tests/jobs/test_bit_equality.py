"""Tests that a watch changes no bit of a run's results, for every model and loop in the zoo."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.long import long_except
from tests.support.model_zoo import CASES, Case, Outcome
from tests.support.recording import EVERYTHING, Recording, recorded
from torchlens_perf.hooks import module as hooks_module
from torchlens_perf.run.ring import Kind

pytestmark = pytest.mark.slow

# These eager cases are fast enough for every test run. Together, these eager cases use every hook
# that applies to one rank.
FEW = (
    "inplace_residual",
    "dropout",
    "gradient_accumulation",
    "two_optimizers",
    "data_loader",
    "generation",
)

WITHOUT_BACKWARD = ("encoder_fast_path", "generation")
# These cases are compiled as a whole, or their model is a single module.
WITHOUT_EAGER_MODULES = (
    "compiled_eager", "compiled_aot_eager", "compiled_inductor", "compiled_loop_body", "recurrent", "sparse_embedding",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, which is faster for tiny tensors and fixes the order of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seed() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    torch._dynamo.reset()


def state_of(outcome: Outcome) -> dict[str, Any]:
    """Return everything that a watch could have changed."""
    return {
        "model": [model.state_dict() for model in outcome.models],
        "gradients": [
            {name: p.grad for name, p in model.named_parameters()} for model in outcome.models
        ],
        "modules": [
            [
                (name, type(module).__qualname__, sorted(vars(module)))
                for name, module in model.named_modules()
            ]
            for model in outcome.models
        ],
        "optimizer": [optimizer.state_dict() for optimizer in outcome.optimizers],
        "losses": outcome.losses,
        "graph": [autograd_graph(loss) for loss in outcome.losses],
        "extra": outcome.extra,
        "random": [torch.get_rng_state(), np.random.get_state(), random.getstate()],
    }


def autograd_graph(loss: torch.Tensor) -> list[str]:
    """Return the names of the operations behind a result, in depth-first order."""
    names, todo, seen = [], [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            todo += [next_node for next_node, _ in node.next_functions]
    return names


def assert_same(expected: Any, actual: Any, where: str = "") -> None:
    """Assert that types and bits are equal."""
    assert type(expected) is type(actual), where
    if isinstance(expected, torch.Tensor):
        assert expected.dtype == actual.dtype, where
        assert expected.requires_grad == actual.requires_grad, where
        # torch.equal() alone is not enough, because it treats a NaN as different from itself.
        assert torch.equal(expected.nan_to_num(nan=7.25), actual.nan_to_num(nan=7.25)), where
        assert torch.equal(expected.isnan(), actual.isnan()), where
    elif isinstance(expected, dict):
        assert list(expected) == list(actual), where
        for key, value in expected.items():
            assert_same(value, actual[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(actual), where
        for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(expected, actual), where
    else:
        assert expected == actual, where


def plain(case: Case) -> tuple[dict[str, Any], list[str]]:
    """Run a case without a watch. Return the state and the warnings."""

    def watching(
        *models: nn.Module, optimizers: Iterable[Any] = ()
    ) -> AbstractContextManager[None]:
        return nullcontext()

    seed()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = case.run(watching)
    return state_of(outcome), [str(warning.message) for warning in caught]


def watched(
    case: Case, folder: Path, **settings: Any
) -> tuple[dict[str, Any], list[str], Recording]:
    """Run a case inside a watch. Return the state, the warnings and the recording."""
    recordings: list[Recording] = []

    @contextmanager
    def watching(*models: nn.Module, optimizers: Iterable[Any] = ()) -> Iterator[Recording]:
        with recorded(folder, list(models), list(optimizers), **settings) as recording:
            recordings.append(recording)
            yield recording

    seed()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = case.run(watching)
    return state_of(outcome), [str(warning.message) for warning in caught], recordings[0]


def assert_harmless(case: Case, folder: Path, **settings: Any) -> Recording:
    """Run the case without and with a watch and compare. Return the recording."""
    # Collect garbage now, because warnings about resources that other tests left open must not fall
    # into one of the runs.
    gc.collect()
    expected, expected_warnings = plain(case)
    actual, actual_warnings, recording = watched(case, folder, **settings)

    assert_same(expected, actual)
    # torch gives some warnings once per process, so the second run may have fewer warnings.
    assert set(actual_warnings) <= set(expected_warnings)
    assert (recording.internal_errors, recording.unbalanced) == (0, 0)
    assert case.steps == len(recording.steps)
    return recording


@pytest.mark.parametrize("name", long_except(set(CASES) - {"compiled_inductor"}, CASES))
def test_watched_run_with_every_hook_is_bit_identical(name: str, tmp_path: Path) -> None:
    """Compared are parameters, buffers, gradients, optimizers, losses, graphs and
    random numbers.
    """
    recording = assert_harmless(CASES[name], tmp_path, **EVERYTHING)

    phases = {record.kind for record in recording.records}
    assert (Kind.BACKWARD in phases) == (name not in WITHOUT_BACKWARD)
    # A model inside the graph of a larger function is not called, so it is not recorded.
    assert (Kind.FORWARD in phases) == (name != "compiled_loop_body")
    assert (Kind.MODULE_BACKWARD in phases) == (
        name not in {*WITHOUT_BACKWARD, *WITHOUT_EAGER_MODULES}
    )


@pytest.mark.parametrize("name", FEW)
def test_watched_run_with_default_settings_is_bit_identical(name: str, tmp_path: Path) -> None:
    assert_harmless(CASES[name], tmp_path)


# The steps of a generation are forward passes, which are not seen here.
@pytest.mark.parametrize("name", [name for name in FEW if name != "generation"])
def test_watched_run_without_module_times_is_bit_identical(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tool has replaced the code of nn.Module.__call__, so calls cannot be routed."""
    monkeypatch.setattr(hooks_module, "route_calls", lambda function: False)
    recording = assert_harmless(CASES[name], tmp_path, **EVERYTHING)

    assert any("neither modules nor forward passes are timed" in note for note in recording.notes)
