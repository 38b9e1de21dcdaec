"""Parameters and gradients can be swapped inside a watch.

torch.utils.swap_tensors() refuses a tensor that has a weak reference. Module.to() swaps parameters
of subclasses, such as those of torchao, and all parameters if
torch.__future__.set_swap_module_params_on_conversion() is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.recording import recorded
from torchlens_perf.run.ring import MICRO_STEPS_MASK

STEPS = 12


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.usefixtures("swapping")
def test_model_is_converted_after_each_step(passes: int, to_none: bool, tmp_path: Path) -> None:
    """The backward passes of each step are counted all the same."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer) as recording:
        for step in range(STEPS):
            now, then = (torch.float32, torch.float64)[:: 1 if step % 2 == 0 else -1]
            for _ in range(passes):
                model(torch.ones(2, 4, dtype=now)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            model.to(then)

    assert [each.value1 & MICRO_STEPS_MASK for each in recording.steps] == [passes] * STEPS


def test_gradients_are_swapped_in_each_step(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer) as recording:
        for _ in range(STEPS):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            for parameter in model.parameters():
                # As Module.to() does.
                gradient, parameter.grad = parameter.grad, None
                torch.utils.swap_tensors(gradient, torch.zeros(parameter.shape))
                parameter.grad = gradient

    assert len(recording.steps) == STEPS


@pytest.mark.parametrize("change", ["emptied", "frozen", "without groups"])
def test_observed_parameter_disappears(change: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer) as recording:
        for step in range(STEPS):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step == STEPS // 2 and change == "emptied":
                optimizer.param_groups[0]["params"].clear()
            elif step == STEPS // 2 and change == "frozen":
                model.weight.requires_grad_(False)
            elif step == STEPS // 2:
                optimizer.param_groups.clear()

    assert len(recording.steps) == STEPS
