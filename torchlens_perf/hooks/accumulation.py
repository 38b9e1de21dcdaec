"""How many backward passes an update's gradients come from: more than one only where gradients are accumulated.

Counting forward or backward passes would take a GAN's two losses, or a gradient penalty, for accumulation. So one
gradient of each optimizer is looked at: a backward pass that finds one and changes it adds to it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torchlens_perf import torch_private
from torchlens_perf.hooks.passed_optimizers import parameters_of

if TYPE_CHECKING:
    from torch import Tensor

_MAX_OPTIMIZERS = 8  # of those that step once for each parameter there are hundreds, and they cannot accumulate


class _Sample:
    """One parameter of an optimizer, and what is known of its gradient."""

    __slots__ = ("_parameter", "_seen", "passes")

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._seen: tuple[int, int] | None = None  # the gradient after the last backward pass
        self.passes = 0  # that it is the sum of

    def _gradient(self) -> tuple[int, int] | None:
        """Which tensor it is, and how often it was written to; None where there is none."""
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        return None if gradient is None else (id(gradient), gradient._version)

    def backward_begins(self) -> None:
        now = self._gradient()
        if now != self._seen:
            self._seen, self.passes = now, 0  # it was cleared: set to None, or written to, by zero_()

    def backward_ended(self) -> None:
        now = self._gradient()
        if now != self._seen:
            self._seen = now
            self.passes += now is not None


class Accumulation:
    """Of all optimizers that have stepped. On the training thread."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}  # by the optimizer's id
        self._out_of_sight = torch_private.out_of_sight()
        self._most = 0  # in the step in progress

    def add(self, optimizer: Any) -> None:
        """From here on its gradients are looked at."""
        if len(self._samples) < _MAX_OPTIMIZERS:
            with self._out_of_sight():
                trained = (each for each in parameters_of(optimizer) if getattr(each, "requires_grad", False))
                parameter = next(trained, None)
            if parameter is not None:
                self._samples[id(optimizer)] = _Sample(parameter)

    def backward_begins(self) -> None:
        """The outermost backward pass begins."""
        if self._samples:
            with self._out_of_sight():
                for sample in self._samples.values():
                    sample.backward_begins()

    def backward_ended(self) -> None:
        """It has ended."""
        if self._samples:
            with self._out_of_sight():
                for sample in self._samples.values():
                    sample.backward_ended()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """The optimizer has used its gradients."""
        sample = self._samples.get(id(optimizer))
        if sample is not None:
            self._most = max(self._most, sample.passes)
            sample.passes = 0

    def step_ended(self) -> int:
        """The passes of the optimizer that had the most in the step that ends; 0 where no gradient was seen to change:
        sharded ones are kept elsewhere."""
        most, self._most = self._most, 0
        return most
